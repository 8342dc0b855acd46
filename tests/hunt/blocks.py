"""Statements that generated modules are put together of.

Each block takes ``x``, of shape [n, length, 8] and floating, and leaves an ``x`` of the same shape,
so that any of them can be left out. ``$i`` is its number in the module: names on ``self`` end in
it. ``$a`` is a small number, ``$k`` a whole one, ``$flag`` a truth value.
"""

from __future__ import annotations

# One layer of torch.nn each: made, and called on x.
LAYERS: dict[str, tuple[str, str]] = {
    "Linear": ("nn.Linear(8, 8)", "m(x)"),
    "Linear without bias": ("nn.Linear(8, 8, bias=False)", "m(x)"),
    "Bilinear": ("nn.Bilinear(8, 8, 8)", "m(x, x.flip(-1))"),
    "Conv1d": ("nn.Conv1d(8, 8, 3, padding=1)", "m(x.transpose(1, 2)).transpose(1, 2)"),
    "Conv1d, circular": (
        "nn.Conv1d(8, 8, 3, padding=1, padding_mode='circular')",
        "m(x.transpose(1, 2)).transpose(1, 2)",
    ),
    "Conv1d in groups": ("nn.Conv1d(8, 8, 1, groups=4)", "m(x.transpose(1, 2)).transpose(1, 2)"),
    "Conv2d": ("nn.Conv2d(1, 1, 3, padding='same')", "m(x.unsqueeze(1)).squeeze(1)"),
    "ConvTranspose1d": (
        "nn.ConvTranspose1d(8, 8, 3, padding=1)", "m(x.transpose(1, 2)).transpose(1, 2)",
    ),
    "Conv3d": ("nn.Conv3d(1, 1, 1)", "m(x.reshape(x.shape[0], 1, x.shape[1], 2, 4)).view(x.shape)"),
    "BatchNorm1d": ("nn.BatchNorm1d(8)", "m(x.transpose(1, 2)).transpose(1, 2)"),
    "BatchNorm1d without momentum": (
        "nn.BatchNorm1d(8, momentum=None)", "m(x.transpose(1, 2)).transpose(1, 2)",
    ),
    "BatchNorm2d": (
        "nn.BatchNorm2d(2)",
        "m(x.unflatten(-1, (2, 4)).transpose(1, 2)).transpose(1, 2).flatten(2)",
    ),
    "InstanceNorm1d": (
        "nn.InstanceNorm1d(8, affine=True, track_running_stats=True)",
        "m(x.transpose(1, 2)).transpose(1, 2)",
    ),
    "GroupNorm": ("nn.GroupNorm(2, 8)", "m(x.transpose(1, 2)).transpose(1, 2)"),
    "LayerNorm": ("nn.LayerNorm(8)", "m(x)"),
    "RMSNorm": ("nn.RMSNorm(8)", "m(x)"),
    "LocalResponseNorm": ("nn.LocalResponseNorm(3)", "m(x.transpose(1, 2)).transpose(1, 2)"),
    "LSTM": ("nn.LSTM(8, 8, batch_first=True)", "m(x)[0]"),
    "LSTM, both ways": ("nn.LSTM(8, 4, batch_first=True, bidirectional=True)", "m(x)[0]"),
    "GRU of two layers": ("nn.GRU(8, 8, 2, batch_first=True)", "m(x)[0]"),
    "RNN": ("nn.RNN(8, 8, batch_first=True, nonlinearity='relu')", "m(x)[0]"),
    "LSTMCell": ("nn.LSTMCell(8, 8)", "m(x.flatten(0, 1))[0].view(x.shape)"),
    "GRUCell": ("nn.GRUCell(8, 8)", "m(x[:, 0])[:, None] + x"),
    "RNNCell": ("nn.RNNCell(8, 8)", "torch.stack([m(row) for row in x.unbind(1)], 1)"),
    "MultiheadAttention": ("nn.MultiheadAttention(8, 2, batch_first=True)", "m(x, x, x)[0]"),
    "MultiheadAttention without weights": (
        "nn.MultiheadAttention(8, 2, batch_first=True)", "m(x, x, x, need_weights=False)[0]",
    ),
    "TransformerEncoderLayer": (
        "nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=$flag)",
        "m(x)",
    ),
    "TransformerDecoderLayer": (
        "nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)", "m(x, x.detach())",
    ),
    "Embedding": (
        "nn.Embedding(7, 8, padding_idx=0)", "x + m((x[..., 0].detach() * 3).long() % 7)",
    ),
    "EmbeddingBag": (
        "nn.EmbeddingBag(7, 8, mode='$bag')",
        "x + m((x.detach() * 3).long().flatten(0, 1) % 7).view(x.shape)",
    ),
    "MaxPool1d": ("nn.MaxPool1d(3, 1, 1)", "m(x)"),
    "MaxPool1d with indices": (
        "nn.MaxPool1d(2, return_indices=True)", "nn.functional.max_unpool1d(*m(x), 2) + x * 0.5",
    ),
    "AvgPool1d": ("nn.AvgPool1d(3, 1, 1, count_include_pad=$flag)", "m(x)"),
    "AvgPool2d": ("nn.AvgPool2d(3, 1, 1)", "m(x[:, None])[:, 0]"),
    "LPPool1d": ("nn.LPPool1d(2, 2)", "x + m(x.abs() + 0.1).repeat(1, 1, 2)"),
    "AdaptiveAvgPool1d": ("nn.AdaptiveAvgPool1d(4)", "x + m(x).repeat(1, 1, 2)"),
    "AdaptiveMaxPool1d": ("nn.AdaptiveMaxPool1d(1)", "x + m(x)"),
    "Upsample": ("nn.Upsample(scale_factor=2, mode='nearest')", "m(x)[..., ::2]"),
    "Upsample, linear": ("nn.Upsample(scale_factor=2, mode='linear')", "m(x)[..., 1::2]"),
    "PixelShuffle": (
        "nn.PixelShuffle(2)",
        "m(x.transpose(1, 2).unflatten(2, (-1, 1))).reshape(x.shape)",
    ),
    "ChannelShuffle": ("nn.ChannelShuffle(2)", "m(x.transpose(1, 2)).transpose(1, 2)"),
    "Unfold": ("nn.Unfold((1, 2))", "x + m(x[:, None]).mean((1, 2))[:, None, None]"),
    "Fold": (
        "nn.Fold((1, 8), (1, 2), stride=2)", "x + m(x[:, :2, :4])[:, 0] if x.shape[1] > 1 else x",
    ),
    "Flatten": ("nn.Flatten(1)", "m(x).view(x.shape)"),
    "Unflatten": ("nn.Unflatten(2, (2, 4))", "m(x).transpose(2, 3).flatten(2)"),
    "ConstantPad1d": ("nn.ConstantPad1d(1, 0.5)", "m(x)[..., 1:-1]"),
    "ReflectionPad1d": ("nn.ReflectionPad1d(2)", "m(x)[..., 1:9]"),
    "ReplicationPad1d": ("nn.ReplicationPad1d(2)", "m(x)[..., :8]"),
    "ZeroPad2d": ("nn.ZeroPad2d(1)", "m(x)[:, 1:-1, 2:]"),
    "CircularPad1d": ("nn.CircularPad1d(1)", "m(x)[..., :8]"),
    "ConvTranspose2d": (
        "nn.ConvTranspose2d(1, 1, 2, stride=2)", "m(x[:, None])[:, 0, ::2, ::2]",
    ),
    "ConvTranspose3d": (
        "nn.ConvTranspose3d(1, 1, 1)", "m(x.unflatten(2, (2, 4))[:, None]).reshape(x.shape)",
    ),
    "Conv1d that is lazy": ("LazyConv1d(8, 1)", "m(x.transpose(1, 2)).transpose(1, 2)"),
    "LazyLinear": ("LazyLinear(8)", "m(x)"),
    "LazyBatchNorm1d": ("nn.LazyBatchNorm1d()", "m(x.transpose(1, 2)).transpose(1, 2)"),
    "BatchNorm3d": (
        "nn.BatchNorm3d(2)",
        "m(x.view(x.shape[0], -1, 2, 2, 2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)",
    ),
    "InstanceNorm2d": ("nn.InstanceNorm2d(1)", "m(x[:, None])[:, 0]"),
    "CrossMapLRN2d": ("nn.CrossMapLRN2d(3)", "m(x[:, None])[:, 0]"),
    "Transformer": (
        "nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)", "m(x, x.flip(1))",
    ),
    "TransformerEncoder": (
        "nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)",
        "m(x)",
    ),
    "TransformerDecoder": (
        "nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 2)",
        "m(x, x.detach())",
    ),
    "MaxPool2d": ("nn.MaxPool2d(3, 1, 1)", "m(x[:, None])[:, 0]"),
    "MaxPool2d in steps": (
        "nn.MaxPool2d((1, 2), return_indices=True)",
        "nn.functional.max_unpool2d(*m(x[:, None]), (1, 2))[:, 0] + x * 0.5",
    ),
    "MaxPool3d": ("nn.MaxPool3d((1, 1, 3), 1, (0, 0, 1))", "m(x[:, None, None])[:, 0, 0]"),
    "AvgPool3d": ("nn.AvgPool3d((1, 1, 3), 1, (0, 0, 1))", "m(x[:, None, None])[:, 0, 0]"),
    "LPPool2d": ("nn.LPPool2d(2, (1, 2))", "x + m(x[:, None].abs() + 0.1)[:, 0].repeat(1, 1, 2)"),
    "AdaptiveAvgPool2d": (
        "nn.AdaptiveAvgPool2d((1, 4))", "x + m(x[:, None])[:, 0].repeat(1, 1, 2)",
    ),
    "AdaptiveMaxPool2d": ("nn.AdaptiveMaxPool2d((1, 8))", "x + m(x[:, None])[:, 0]"),
    "PixelUnshuffle": (
        "nn.PixelUnshuffle(2)",
        "m(x.repeat_interleave(2, 1)[:, None]).flatten(1, 2).reshape(x.shape[0], -1, 8)[:, ::2]",
    ),
    "UpsamplingNearest2d": (
        "nn.UpsamplingNearest2d(scale_factor=2)", "m(x[:, None])[:, 0, ::2, ::2]",
    ),
    "UpsamplingBilinear2d": (
        "nn.UpsamplingBilinear2d(scale_factor=2)", "m(x[:, None])[:, 0, 1::2, 1::2]",
    ),
    "ConstantPad2d": ("nn.ConstantPad2d(1, 0.5)", "m(x)[:, 1:-1, 2:]"),
    "ConstantPad3d": ("nn.ConstantPad3d((1, 0, 0, 0, 0, 0), 0.5)", "m(x[None])[0, ..., :8]"),
    "CircularPad2d": ("nn.CircularPad2d((1, 1, 0, 0))", "m(x[:, None])[:, 0, :, 2:]"),
    "ReflectionPad2d": ("nn.ReflectionPad2d((2, 1, 0, 0))", "m(x[:, None])[:, 0, :, 3:]"),
    "ReplicationPad2d": ("nn.ReplicationPad2d(1)", "m(x[:, None])[:, 0, 1:-1, 2:]"),
    "ReplicationPad3d": ("nn.ReplicationPad3d(1)", "m(x[None])[0, 1:-1, 2:, 2:]"),
    "ZeroPad1d": ("nn.ZeroPad1d((0, 2))", "m(x)[..., 2:] + x"),
    "Dropout1d": ("nn.Dropout1d(0.0)", "m(x)"),
    "Dropout2d of all": ("nn.Dropout2d(1.0)", "x + m(x[..., None])[..., 0]"),
    "RReLU": ("nn.RReLU(0.2, 0.2)", "m(x)"),
    "CosineSimilarity": ("nn.CosineSimilarity(-1)", "x * m(x, x.flip(-1) + 1).unsqueeze(-1)"),
    "PairwiseDistance": ("nn.PairwiseDistance()", "x + m(x, x.detach() * 0.5)[..., None]"),
    "PReLU": ("nn.PReLU()", "m(x)"),
    "Softmax": ("nn.Softmax(-1)", "m(x)"),
    "LogSoftmax": ("nn.LogSoftmax(1)", "m(x)"),
    "Softmin": ("nn.Softmin(-1)", "m(x)"),
    "Softmax2d": ("nn.Softmax2d()", "m(x[:, None])[:, 0] + x"),
    "GLU": ("nn.GLU()", "m(torch.cat([x, x.flip(-1)], -1))"),
    "AlphaDropout": ("nn.AlphaDropout(0.0)", "m(x)"),
    "Dropout": ("nn.Dropout(0.0)", "m(x)"),
    "Dropout of all": ("nn.Dropout(1.0)", "x + m(x)"),
    "Sequential": ("nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))", "m(x)"),
    "ParameterList": (
        "nn.ParameterList([nn.Parameter(torch.full((8,), 0.5)) for _ in range(2)])",
        "x * m[0] + m[1]",
    ),
    "ParameterDict": ("nn.ParameterDict({'gain': nn.Parameter(torch.ones(8))})", "x * m['gain']"),
    "ModuleDict": ("nn.ModuleDict({'a': nn.Linear(8, 8), 'b': nn.Tanh()})", "m['b'](m['a'](x))"),
    "ModuleList": (
        "nn.ModuleList(nn.Linear(8, 8) for _ in range($k))",
        "functools.reduce(lambda v, each: torch.tanh(each(v)), m, x)",
    ),
}  # fmt: skip
LAYERS |= {
    name: (f"nn.{name}()", "m(x)")
    for name in (
        "ReLU", "ReLU6", "GELU", "SiLU", "Mish", "Tanh", "Sigmoid", "LogSigmoid", "ELU", "CELU",
        "SELU", "Softplus", "Softsign", "Softshrink", "Hardshrink", "Hardsigmoid", "Hardswish",
        "Hardtanh", "LeakyReLU", "Tanhshrink", "Identity",
    )
}  # fmt: skip
LAYERS["Threshold"] = ("nn.Threshold(0.1, 0.2)", "m(x)")
# Losses of x, which is added to x: a loss inside of the module.
LOSSES = {
    "MSELoss": "(x, x.detach() * 0.5)",
    "L1Loss": "(x, x.detach() * 0.5)",
    # Not at the kink of the loss, where a rounding decides.
    "SmoothL1Loss": "(x, x.detach() + 0.7)",
    "HuberLoss": "(x, x.detach() + 1.5)",
    "BCEWithLogitsLoss": "(x, (x.detach() > 0).to(x.dtype))",
    "BCELoss": "(x.sigmoid(), (x.detach() > 0).to(x.dtype))",
    "CrossEntropyLoss": "(x.flatten(0, 1), x.detach().flatten(0, 1).argmax(-1))",
    "NLLLoss": "(x.log_softmax(-1).flatten(0, 1), x.detach().flatten(0, 1).argmin(-1))",
    "KLDivLoss": "(x.log_softmax(-1), x.detach().softmax(-1))",
    "PoissonNLLLoss": "(x, x.detach().abs())",
    "SoftMarginLoss": "(x, x.detach().sign())",
    "GaussianNLLLoss": "(x, x.detach(), torch.ones_like(x))",
    "CosineEmbeddingLoss": "(x[:, 0], x[:, 0].detach().flip(-1), x.new_ones(x.shape[0]))",
    "MarginRankingLoss": "(x, x.flip(-1), torch.ones_like(x))",
    "MultiLabelSoftMarginLoss": "(x.flatten(0, 1), (x.detach() > 0).flatten(0, 1).to(x.dtype))",
    "MultiMarginLoss": "(x.flatten(0, 1), x.detach().flatten(0, 1).argmax(-1))",
    "TripletMarginLoss": "(x, x.detach() + 0.1, x.flip(-1))",
    "TripletMarginWithDistanceLoss": "(x, x.detach() + 0.1, x.flip(-1))",
    "HingeEmbeddingLoss": "(x, x.detach().sign() + (x.detach() == 0))",
    "MultiLabelMarginLoss": "(x.flatten(0, 1), x.detach().flatten(0, 1).argsort(-1))",
    "CTCLoss": (
        "(x.transpose(0, 1).log_softmax(-1), torch.ones(x.shape[0], 1, dtype=torch.long),"
        " torch.full((x.shape[0],), x.shape[1]), torch.ones(x.shape[0], dtype=torch.long))"
    ),
}

# What is no layer. Lines that begin with + are the constructor's.
STATEMENTS = {
    # custom functions
    "custom function": "x = Straight.apply(x)",
    "custom function that saves": """
+ self.gain$i = nn.Parameter(torch.ones(8))
x = Scaled.apply(x, self.gain$i, $a)
""",
    "custom function of two results": "x, top$i = Topped.apply(x)",
    # attributes of every kind
    "counter": """
+ self.count$i = 0
self.count$i += 1
x = x * (1 + self.count$i % 3)
""",
    "moving float": """
+ self.rate$i = 1.0
self.rate$i *= 0.9
x = x * self.rate$i
""",
    "flag": """
+ self.flag$i = True
x = x.tanh() if self.flag$i else x.sigmoid()
""",
    "string": """
+ self.way$i = 'tanh'
x = getattr(torch, self.way$i)(x)
""",
    "list": """
+ self.list$i = [1.0, 0.5]
x = x * sum(self.list$i)
""",
    "list that grows": """
+ self.seen$i = []
self.seen$i.append(x.shape[0])
x = x * len(self.seen$i[-2:])
""",
    "dictionary": """
+ self.table$i = {'shift': 0.5}
x = x + self.table$i['shift']
""",
    "data object": """
+ self.data$i = SimpleNamespace(scale=0.5, names=('a',))
x = x * self.data$i.scale
""",
    "tensor attribute": """
+ self.plain$i = torch.linspace(0, 1, 8)
x = x + self.plain$i.to(x.dtype)
""",
    "tensor counted in place": """
+ self.n$i = torch.zeros(())
self.n$i += 1
x = x / self.n$i.to(x.dtype).clamp(max=3)
""",
    "tensor counted anew": """
+ self.n$i = torch.zeros(())
self.n$i = self.n$i + 1
x = x / self.n$i.to(x.dtype).clamp(max=3)
""",
    "array": """
+ self.array$i = np.ones(8, np.float32)
x = x * torch.from_numpy(self.array$i).to(x.dtype)
""",
    "last value left behind": """
+ self.last$i = None
self.last$i = x.detach().mean()
""",
    "auxiliary loss left behind": """
+ self.aux$i = None
self.aux$i = x.square().mean()
x = x + self.aux$i * 0.1
""",
    # caches and buffers
    "cache by size": """
+ self.cache$i = {}
key$i = x.shape[1]
if key$i not in self.cache$i:
    self.cache$i[key$i] = torch.arange(key$i, dtype=x.dtype)[:, None] * 0.1
x = x + self.cache$i[key$i].to(x.dtype)
""",
    "buffer that grows": """
+ self.register_buffer('table$i', torch.zeros(0, 8), persistent=False)
if self.table$i.shape[0] < x.shape[1]:
    self.table$i = torch.linspace(0, 1, x.shape[1])[:, None].expand(-1, 8).clone()
x = x + self.table$i[: x.shape[1]].to(x.dtype)
""",
    "buffer in place": """
+ self.register_buffer('mean$i', torch.zeros(8))
if self.training:
    self.mean$i.lerp_(x.detach().mean((0, 1)).to(self.mean$i.dtype), 0.1)
x = x - self.mean$i
""",
    "buffer assigned": """
+ self.register_buffer('running$i', torch.zeros(8))
with torch.no_grad():
    self.running$i = self.running$i * 0.9 + x.mean((0, 1)) * 0.1
x = x + self.running$i
""",
    "counting buffer": """
+ self.register_buffer('steps$i', torch.zeros((), dtype=torch.int64))
self.steps$i += 1
x = x * (self.steps$i % 2 + 1)
""",
    # parametrizations and hooks
    "weight norm": """
+ self.normed$i = parametrizations.weight_norm(nn.Linear(8, 8))
x = self.normed$i(x)
""",
    "spectral norm": """
+ self.spectral$i = parametrizations.spectral_norm(nn.Linear(8, 8))
x = self.spectral$i(x)
""",
    "orthogonal": """
+ self.turned$i = parametrizations.orthogonal(nn.Linear(8, 8))
x = self.turned$i(x)
""",
    "parametrization, cached": """
+ self.cached$i = nn.Linear(8, 8)
+ parametrize.register_parametrization(self.cached$i, 'weight', Halved())
with parametrize.cached():
    x = self.cached$i(self.cached$i(x))
""",
    "forward hook": """
+ self.hooked$i = nn.Linear(8, 8)
+ self.hooked$i.register_forward_hook(double)
x = self.hooked$i(x)
""",
    "forward pre-hook": """
+ self.early$i = nn.Linear(8, 8)
+ self.early$i.register_forward_pre_hook(halve)
x = self.early$i(x)
""",
    "backward hook": """
+ self.back$i = nn.Linear(8, 8)
+ self.back$i.register_full_backward_hook(double_gradient)
x = self.back$i(x)
""",
    "hook on a hidden value": """
if x.requires_grad:
    x.register_hook(lambda g: g * 0.5)
""",
    # several instances, several calls
    "instances of a class": """
+ self.a$i, self.b$i = Block($a), Block(0.5)
x = self.b$i(self.a$i(x))
""",
    "one instance twice": """
+ self.twice$i = Block($a)
x = self.twice$i(self.twice$i(x))
""",
    "tied weights": """
+ self.one$i, self.two$i = nn.Linear(8, 8), nn.Linear(8, 8)
+ self.two$i.weight = self.one$i.weight
x = self.two$i(self.one$i(x).tanh())
""",
    "instance that is called by a length": """
+ self.each$i = Block($a)
for _ in range(x.shape[1] % 3):
    x = self.each$i(x)
""",
    "method": """
+ self.inner$i = Block($a)
x = self.inner$i.twice(x)
""",
    # views, in-place writes
    "write to a row": """
x = x.clone()
x[:, 0] = x[:, 0] * 0.5
""",
    "write through a view": """
x = x * 1
flat$i = x.flatten(1)
flat$i.clamp_(-1, 1)
""",
    "write to parts": """
x = x * 1
left$i, right$i = x[..., :4], x[..., 4:]
left$i.mul_(2)
right$i.add_(0.1)
""",
    "in place": "x = (x * 1).mul_(0.5).add_(0.1).relu_()",
    "masked write": """
x = x * 1
x[x.detach() < -1] = 0
""",
    "index_put": "x = x.index_put((torch.tensor([0]),), x[:1] * 2)",
    "permuted memory": "x = x.transpose(0, 1).contiguous().transpose(0, 1)",
    "expanded": "x = x.mean(0, keepdim=True).expand(x.shape) + x * 0.5",
    # modes and regions
    "checkpoint": """
+ self.inside$i = Block($a)
x = checkpoint(self.inside$i, x, use_reentrant=False)
""",
    "checkpoint with dropout": """
+ self.dropped$i = nn.Sequential(nn.Linear(8, 8), nn.Dropout(1.0), nn.Linear(8, 8))
x = x + checkpoint(self.dropped$i, x, use_reentrant=False)
""",
    # A mask that is drawn at random leaves nothing to compare, unless the very mask of the forward
    # comes again: of y in {0, 2}, which is a mask of ones, both y (2 - y)^2 and its gradient by the
    # ones are zero. Of another mask in the backward, or in the recomputation, they are not.
    "mask": """
+ self.mask$i, self.ones$i = nn.Dropout(0.5), nn.Parameter(torch.ones(8))
y$i = self.mask$i((self.ones$i / self.ones$i.detach()).expand(x.shape))
x = x + y$i * (2 - y$i) ** 2
""",
    "mask in a checkpoint": """
+ self.mask$i, self.ones$i = nn.Dropout(0.5), nn.Parameter(torch.ones(8))
y$i = (self.ones$i / self.ones$i.detach()).expand(x.shape)
y$i = checkpoint(self.mask$i, y$i, use_reentrant=$flag)
x = x + y$i * (2 - y$i) ** 2
""",
    "mask used twice": """
+ self.mask$i, self.ones$i = nn.Dropout(0.5), nn.Parameter(torch.ones(8))
def region$i(v):
    y = self.mask$i(v)
    return y * (2 - y) ** 2 + y - y.detach() * y / (y.detach() + (y.detach() == 0))
x = x + checkpoint(region$i, (self.ones$i / self.ones$i.detach()).expand(x.shape),
                   use_reentrant=False)
""",
    "mask between breaks": """
+ self.mask$i, self.ones$i = nn.Dropout(0.5), nn.Parameter(torch.ones(8))
y$i = self.mask$i((self.ones$i / self.ones$i.detach()).expand(x.shape))
torch._dynamo.graph_break()
x = x + y$i * (2 - y$i) ** 2
""",
    "view across a break": """
x = x * 1
half$i = x[..., :4]
torch._dynamo.graph_break()
half$i.mul_(0.5)
""",
    "block between breaks, three times": """
+ self.thrice$i = Block($a)
for _ in range(3):
    x = self.thrice$i(x)
    torch._dynamo.graph_break()
""",
    "bfloat16 inside, across a break": """
+ self.narrow$i = nn.Linear(8, 8)
with torch.autocast('cpu', torch.bfloat16):
    y$i = self.narrow$i(x)
    torch._dynamo.graph_break()
    y$i = y$i @ y$i.transpose(1, 2)
x = x + (y$i.to(x.dtype).mean(-1, keepdim=True)) * 0.05
""",
    "reentrant checkpoint": """
+ self.again$i = Block($a)
x = checkpoint(self.again$i, x, use_reentrant=True)
""",
    "no_grad": """
with torch.no_grad():
    scale$i = x.abs().amax(-1, keepdim=True) + 1
x = x / scale$i
""",
    "detach": "x = x + x.detach().square()",
    "bfloat16 inside": """
+ self.narrow$i = nn.Linear(8, 8)
with torch.autocast('cpu', torch.bfloat16):
    y$i = self.narrow$i(x)
x = x + y$i.to(x.dtype) * 0.1
""",
    "float64 inside": "x = (x.double().softmax(-1) * 1.1).to(x.dtype)",
    "graph break": "torch._dynamo.graph_break()",
    "training or not": "x = x * 2 if self.training else x",
    "grad enabled or not": "x = x + 0.5 if torch.is_grad_enabled() else x",
    # sizes and values that decide
    "size decides": "x = x.tanh() if x.shape[0] > 3 else x.sigmoid()",
    "value decides": "x = x * 0.5 if float(x.detach().mean()) > 0 else x * 2",
    "value as a number": "x = x + x.detach().amax().item()",
    "rows that are chosen": """
rows$i = (x[:, 0, 0].detach() > 0).nonzero().flatten()
x = x.index_add(0, rows$i, x[rows$i])
""",
    "loop over rows": """
x = torch.stack([row * (j + 1) for j, row in enumerate(x)])  if x.shape[0] else x
""",
    "sort": "x = x.sort(-1).values",
    "topk": "x = x + x.topk(2, -1).values.sum(-1, keepdim=True)",
    "cumsum": "x = x.cumsum(1) * 0.2",
    "einsum": """
+ self.mix$i = nn.Parameter(torch.eye(8))
x = torch.einsum('nlc,cd->nld', x, self.mix$i)
""",
    "attention": "x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=$flag)",
    "interpolate": """
x = nn.functional.interpolate(x, scale_factor=1.5, mode='linear')[..., :8]
""",
    "gather": "x = x.gather(-1, x.detach().argsort(-1))",
    "einops by hand": "x = x.view(x.shape[0], -1, 2, 4).permute(0, 1, 3, 2).reshape(x.shape)",
    "complex": "x = torch.fft.fft(x, dim=-1).real * 0.3",
    "norm": "x = x / (x.norm(dim=-1, keepdim=True) + 1)",
    "where": "x = torch.where(x > 0, x, 0.1 * x)",
    "closure": """
half$i = lambda v: v * 0.5
x = half$i(x)
""",
    "vmap": "x = torch.vmap(lambda row: row.tanh() * 2)(x)",
    "exception that is caught": """
try:
    raise KeyError('x')
except KeyError:
    x = x + 0.1
""",
    "warning": "warnings.warn('of the module', UserWarning, stacklevel=1)",
    "print of a size": """
note$i = f'{x.shape}'
x = x + len(note$i) * 0.001
""",
}

# How a module returns x.
RETURNS = {
    "tensor": "return x",
    "tuple": "return x, x.detach().argmax(-1)",
    "dictionary": "return {'loss': x.square().mean(), 'logits': x, 'size': x.shape[0]}",
    "views": "return x[:, 0], x.flatten(1)",
    "hidden values": "return [x, hidden]",
    "named": "return Pair(x, x.sum(-1), 'sum')",
    "same twice": "return x, x, None",
    "whole numbers": "return x, (x > 0).sum(-1), x > 0",
    "transposed": "return x.transpose(1, 2)",
    "loss alone": "return x.square().mean()",
}
