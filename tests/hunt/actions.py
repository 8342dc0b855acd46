"""What scripts do with a module: lines of Python that generated scripts are put together of.

In them, ``s`` is a :class:`~tests.hunt.running.Run`. ``$n`` is a number of rows, ``$length``
another length, ``$which`` picks a parameter or a part, ``$rate`` is a small number. Each action is
one class of real scripts; what the pages say is otherwise in a graph is not among them, and the
sentence stands beside the place.
"""

from __future__ import annotations

TRAIN = """
args, kwargs = s.batch($n, $length)
out = s.model(*args, **kwargs)
s.see(out)
s.loss(out).backward()
s.look()
s.optimizer.step()
s.optimizer.zero_grad()
"""

# "Around an ORTModule both work, but for a forward that changes a buffer which it reads, so that
# its two runs differ": in evaluation it changes none.
AROUND = """
if any(isinstance(part, Running | Normed) for part in s.inner().modules()):
    s.model.eval()
args, kwargs = s.batch($n, $length)
args = tuple(a.requires_grad_() if a.is_floating_point() else a for a in args)
def first(*given):
    return s.loss(s.model(*given, **kwargs))
loss = torch.utils.checkpoint.checkpoint(first, *args, use_reentrant=False)
s.see(loss)
loss.backward()
"""

# Calls, and what is done with their results.
CALLS = {
    "step": TRAIN,
    "step of one row": TRAIN.replace("$n", "1"),
    "step of many rows": TRAIN.replace("$n", "17"),
    "accumulate": """
for n in ($n, $n, 2):
    args, kwargs = s.batch(n, $length)
    s.loss(s.model(*args, **kwargs)).backward()
s.look()
s.optimizer.step()
s.model.zero_grad(set_to_none=False)
""",
    "accumulate around an evaluation": """
for n in ($n, 3):
    args, kwargs = s.batch(n, $length)
    s.loss(s.model(*args, **kwargs)).backward()
    s.model.eval()
    with torch.no_grad():
        s.see(s.model(*args, **kwargs))
    s.model.train()
s.look()
s.see(clip_grad_norm_([p for p in s.model.parameters() if p.grad is not None], $rate))
s.optimizer.step()
s.optimizer.zero_grad()
""",
    "accumulate over a copy": """
args, kwargs = s.batch($n, $length)
s.loss(s.model(*args, **kwargs)).backward()
s.look()
twin = copy.deepcopy(s.model)
for model in (twin, s.model, twin):
    args, kwargs = s.batch($n, $length)
    s.loss(model(*args, **kwargs)).backward()
s.see([p.grad for p in twin.parameters()])
""",
    "step with subscribers": """
manager, doubling = SubscriberManager(), Doubling()
if not s.draws():  # of doubled masks the numbers tell which they are
    manager.subscribe(s.model, [doubling])
try:
    args, kwargs = s.batch($n, $length)
    out = s.model(*args, **kwargs)
    s.see(out)
    s.loss(out).backward()
finally:
    if not s.draws():
        manager.unsubscribe()
s.see(doubling.seen)
""",
    "leave gradients": """
args, kwargs = s.batch($n, $length)
s.loss(s.model(*args, **kwargs)).backward()
""",
    "no rows": """
args, kwargs = s.batch(0, $length)
s.see(s.model(*args, **kwargs))
""",
    "step without contiguous memory": """
args, kwargs = s.batch($n, $length)
args = tuple(s.spread(a) for a in args)
out = s.model(*args, **kwargs)
s.see(out)
s.loss(out).backward()
""",
    "step of an expanded argument": """
args, kwargs = s.batch(3, $length)
args = tuple(a[:1].expand(a.shape) if a.dim() > 1 and a.shape[0] == 3 else a for a in args)
out = s.model(*args, **kwargs)
s.see(out)
s.loss(out).backward()
""",
    "arguments that want gradients": """
args, kwargs = s.batch($n, $length)
args = tuple(a.requires_grad_() if a.is_floating_point() else a for a in args)
out = s.model(*args, **kwargs)
s.see(out)
s.loss(out).backward()
s.see([a.grad for a in args])
""",
    "arguments that are computed": """
args, kwargs = s.batch($n, $length)
roots = [a.requires_grad_() if a.is_floating_point() else a for a in args]
out = s.model(*[r * 2 if r.is_floating_point() else r for r in roots], **kwargs)
s.loss(out).backward()
s.see([r.grad for r in roots])
""",
    "argument that is a parameter elsewhere": """
args, kwargs = s.batch($n, $length)
given = [torch.nn.Parameter(a) if a.is_floating_point() else a for a in args]
out = s.model(*given, **kwargs)
s.loss(out).backward()
s.see([g.grad for g in given])
""",
    "argument of another dtype": """
args, kwargs = s.batch($n, $length)
args = tuple(a.float() if a.dtype == torch.float64 else a.double() for a in args)
s.see(s.model(*args, **kwargs))
""",
    "argument of another width": """
args, kwargs = s.batch($n, $length)
s.see(s.model(*[a[..., :-1] for a in args], **kwargs))
""",
    "argument of no axes": """
args, kwargs = s.batch(2, 2)
s.see(s.model(args[0].flatten()[0], *args[1:], **kwargs))
""",
    "argument that is missing": """
s.see(s.model())
""",
    "keyword that is unknown": """
args, kwargs = s.batch($n, $length)
s.see(s.model(*args, **kwargs, surprise=1))
""",
    "arguments by keyword": """
args, kwargs = s.batch($n, $length)
names = list(inspect.signature(s.inner().forward).parameters)
out = s.model(**dict(zip(names, args)), **kwargs)
s.see(out)
s.loss(out).backward()
""",
    "evaluation": """
s.model.eval()
with torch.no_grad():
    args, kwargs = s.batch($n, $length)
    s.see(s.model(*args, **kwargs))
s.model.train()
""",
    "evaluation with gradients": """
s.model.eval()
args, kwargs = s.batch($n, $length)
out = s.model(*args, **kwargs)
s.see(out)
s.loss(out).backward()
s.model.train()
""",
    "training mode without gradients": """
with torch.no_grad():
    args, kwargs = s.batch($n, $length)
    s.see(s.model(*args, **kwargs))
""",
    "inference mode": """
s.model.eval()
with torch.inference_mode():
    args, kwargs = s.batch($n, $length)
    out = s.model(*args, **kwargs)
    s.see(out)
s.see(s.tensors(out)[0].is_inference())
s.model.train()
""",
    "arguments made in inference mode": """
with torch.inference_mode():
    args, kwargs = s.batch($n, $length)
with torch.no_grad():
    s.see(s.model(*args, **kwargs))
""",
    "gradients switched off and on": """
torch.set_grad_enabled(False)
args, kwargs = s.batch($n, $length)
s.see(s.model(*args, **kwargs))
torch.set_grad_enabled(True)
out = s.model(*args, **kwargs)
s.see(out)
s.loss(out).backward()
""",
    "gradients on in no_grad": """
with torch.no_grad():
    args, kwargs = s.batch($n, $length)
    with torch.enable_grad():
        loss = s.loss(s.model(*args, **kwargs))
        loss.backward()
s.see(loss)
""",
    "two forwards, backward in order": """
first, second = s.batch($n, $length), s.batch(3, $length)
a, b = s.model(*first[0], **first[1]), s.model(*second[0], **second[1])
s.loss(a).backward()
s.look()
s.loss(b).backward()
""",
    "two forwards, backward in turn": """
first, second = s.batch($n, $length), s.batch($n, $length)
a, b = s.model(*first[0], **first[1]), s.model(*second[0], **second[1])
s.loss(b).backward()
s.look()
s.loss(a).backward()
""",
    "two forwards, one backward": """
first, second = s.batch($n, $length), s.batch($n, $length)
a, b = s.model(*first[0], **first[1]), s.model(*second[0], **second[1])
(s.loss(a) * s.loss(b)).backward()
""",
    "forward that is dropped": """
args, kwargs = s.batch($n, $length)
out = s.model(*args, **kwargs)
del out
args, kwargs = s.batch($n, $length)
s.loss(s.model(*args, **kwargs)).backward()
""",
    "backward of one output": """
args, kwargs = s.batch($n, $length)
outs = [t for t in s.tensors(s.model(*args, **kwargs)) if t.requires_grad and t.grad_fn is not None]
if outs:
    outs[$which % len(outs)].square().sum().backward()
""",
    "backward of each output alone": """
args, kwargs = s.batch($n, $length)
outs = [t for t in s.tensors(s.model(*args, **kwargs)) if t.requires_grad and t.grad_fn is not None]
for out in outs:
    out.sum().backward(retain_graph=True)
    s.look()
""",
    "gradient of part of an output": """
args, kwargs = s.batch(4, 4)
outs = [t for t in s.tensors(s.model(*args, **kwargs)) if t.requires_grad and t.grad_fn is not None]
(outs[0].flatten()[::2] * $rate).sum().backward()
""",
    "backward with given gradients": """
args, kwargs = s.batch($n, $length)
outs = [t for t in s.tensors(s.model(*args, **kwargs)) if t.requires_grad and t.grad_fn is not None]
torch.autograd.backward(outs, [torch.full_like(t, 0.5) for t in outs])
""",
    "expanded gradients": """
args, kwargs = s.batch($n, $length)
outs = [t for t in s.tensors(s.model(*args, **kwargs)) if t.requires_grad and t.grad_fn is not None]
outs[-1].backward(torch.tensor($rate, dtype=outs[-1].dtype).expand(outs[-1].shape))
""",
    "retain_graph": """
args, kwargs = s.batch($n, $length)
loss = s.loss(s.model(*args, **kwargs))
loss.backward(retain_graph=True)
s.look()
loss.backward()
""",
    "second backward that is an error": """
args, kwargs = s.batch($n, $length)
loss = s.loss(s.model(*args, **kwargs))
loss.backward()
loss.backward()
""",
    "autograd.grad": """
args, kwargs = s.batch($n, $length)
loss = s.loss(s.model(*args, **kwargs))
wanted = [p for p in s.model.parameters() if p.requires_grad]
s.see(torch.autograd.grad(loss, wanted, allow_unused=True))
""",
    "autograd.grad of some": """
args, kwargs = s.batch($n, $length)
loss = s.loss(s.model(*args, **kwargs))
wanted = [p for p in s.model.parameters() if p.requires_grad][-1:]
s.see(torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True))
s.see(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
""",
    "autograd.grad of an argument": """
args, kwargs = s.batch($n, $length)
x = [a.requires_grad_() for a in args if a.is_floating_point()]
loss = s.loss(s.model(*args, **kwargs))
s.see(torch.autograd.grad(loss, x))
""",
    "backward for some inputs": """
args, kwargs = s.batch($n, $length)
loss = s.loss(s.model(*args, **kwargs))
loss.backward(inputs=[p for p in s.model.parameters() if p.requires_grad][:1])
""",
    "gradient penalty": """
args, kwargs = s.batch($n, $length)
x = [a.requires_grad_() for a in args if a.is_floating_point()] or [s.parameter($which)]
loss = s.loss(s.model(*args, **kwargs))
first = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
penalty = sum(g.square().sum() for g in first if g is not None)
s.see(penalty)
(loss + penalty).backward()
""",
    "loss of detached outputs": """
args, kwargs = s.batch($n, $length)
out = s.model(*args, **kwargs)
first = s.tensors(out)[0]
(s.loss(out) * first.detach().double().sum()).backward()
""",
    # "A view of one is a copy, so that a write to it is no write to what it was taken of": outputs
    # of which others are views are written to in no action.
    "write to an output": """
args, kwargs = s.batch($n, $length)
outs = [t for t in s.tensors(s.model(*args, **kwargs)) if t.grad_fn is not None]
outs[0].mul_(2)
s.see(outs[0])
s.backward(outs[0].sum())
""",
    "write to a detached output": """
args, kwargs = s.batch($n, $length)
with torch.no_grad():
    outs = [t for t in s.tensors(s.model(*args, **kwargs)) if t.is_floating_point()]
    outs[0] += 1
s.see(outs[0])
""",
    "write to an argument after the forward": """
args, kwargs = s.batch($n, $length)
out = s.model(*args, **kwargs)
for a in args:
    a.zero_()
s.backward(s.loss(out))
""",
    "outputs with gradients kept and hooks": """
args, kwargs = s.batch($n, $length)
out = s.model(*args, **kwargs)
outs = [t for t in s.tensors(out) if t.grad_fn is not None]
heard = [[] for t in outs]  # in which order those of one node hear is nobody's promise
for t, own in zip(outs, heard):
    t.retain_grad()
    t.register_hook(own.append)
s.loss(out).backward()
s.see(heard)
s.see([t.grad for t in outs])
""",
    "hook that doubles the gradient of an output": """
args, kwargs = s.batch($n, $length)
out = s.model(*args, **kwargs)
for t in s.tensors(out):
    if t.grad_fn is not None:
        t.register_hook(lambda gradient: gradient * 2)
s.loss(out).backward()
""",
    "output is the next input": """
args, kwargs = s.batch(4, $length)
floats = [t for t in s.tensors(s.model(*args, **kwargs)) if t.is_floating_point()]
mixed = floats[0].mean()
again = tuple(a + mixed if a.is_floating_point() else a for a in args)
s.loss(s.model(*again, **kwargs)).backward()
""",
    "state is carried over calls": """
args, kwargs = s.batch(2, $length)
out = s.model(*args, **kwargs)
carried = [t.detach() for t in s.tensors(out)]
for _ in range(2):
    args, kwargs = s.batch(2, $length)
    args = tuple(a + carried[0].mean().to(a.dtype) if a.is_floating_point() else a for a in args)
    out = s.model(*args, **kwargs)
    carried = [t.detach() for t in s.tensors(out)]
    s.loss(out).backward()
""",
    "keep a loss for later": """
args, kwargs = s.batch($n, $length)
s.pending.append(s.loss(s.model(*args, **kwargs)))
""",
    "outputs are kept alive": """
kept = []
for n in ($n, $n, 3):
    args, kwargs = s.batch(n, $length)
    out = s.model(*args, **kwargs)
    kept.append(out)
    s.loss(out).backward()
s.optimizer.step()
s.see(kept)
s.optimizer.zero_grad()
""",
    "the state of the generator is restored": """
args, kwargs = s.batch($n, $length)
state = torch.get_rng_state()
first = s.model(*args, **kwargs)
torch.set_rng_state(state)
second = s.model(*args, **kwargs)
s.see([first, second])
s.loss(second).backward()
""",
    "backward of what was kept": """
if s.pending:
    s.backward(s.pending.pop())
""",
    "optimizer step between forward and backward": """
args, kwargs = s.batch($n, $length)
s.loss(s.model(*args, **kwargs)).backward()
loss = s.loss(s.model(*args, **kwargs))
s.optimizer.step()
s.backward(loss)
""",
    "clip_grad_norm_": """
args, kwargs = s.batch($n, $length)
s.loss(s.model(*args, **kwargs)).backward()
s.see(torch.nn.utils.clip_grad_norm_(s.model.parameters(), $rate))
s.optimizer.step()
s.optimizer.zero_grad()
""",
    "closure": """
args, kwargs = s.batch($n, $length)
def closure():
    s.optimizer.zero_grad()
    loss = s.loss(s.model(*args, **kwargs))
    loss.backward()
    return loss
s.see(s.optimizer.step(closure))
""",
    "LBFGS": """
args, kwargs = s.batch(5, $length)
lbfgs = torch.optim.LBFGS([p for p in s.model.parameters() if p.requires_grad], lr=0.05, max_iter=3)
def closure():
    lbfgs.zero_grad()
    loss = s.loss(s.model(*args, **kwargs))
    loss.backward()
    return loss
s.see(lbfgs.step(closure))
""",
    "GradScaler": """
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
args, kwargs = s.batch($n, $length)
scaler.scale(s.loss(s.model(*args, **kwargs))).backward()
scaler.unscale_(s.optimizer)
s.look()
scaler.step(s.optimizer)
scaler.update()
s.see(scaler.get_scale())
s.optimizer.zero_grad()
""",
    "autocast that is switched off": """
with torch.autocast("cpu", enabled=False):
    args, kwargs = s.batch($n, $length)
    out = s.model(*args, **kwargs)
s.see(out)
s.loss(out).backward()
""",
    "autocast around a copy": """
twin = copy.deepcopy(s.model).eval()
args, kwargs = s.batch($n, $length)
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    s.see(twin(*args, **kwargs), reduced=True)
""",
    "checkpoint around it": AROUND + "s.see([a.grad for a in args])\n",
    "reentrant checkpoint around it": AROUND.replace("use_reentrant=False", "use_reentrant=True"),
    "functional_call": """
args, kwargs = s.batch($n, $length)
scaled = {k: v * 0.5 for k, v in s.model.named_parameters()}
out = torch.func.functional_call(s.model, scaled, args, kwargs)
s.see(out)
s.loss(out).backward()
""",
    "functional_call with plain tensors": """
args, kwargs = s.batch($n, $length)
other = {k: v.detach() * 0.5 for k, v in s.model.named_parameters()}
with torch.no_grad():
    s.see(torch.func.functional_call(s.model, other, args, kwargs))
""",
    "torch.func.grad": """
args, kwargs = s.batch($n, $length)
values = {k: v.detach() for k, v in s.model.named_parameters()}
def loss_of(values):
    return s.loss(torch.func.functional_call(s.model, values, args, kwargs)).sum()
s.see(torch.func.grad(loss_of)(values))
""",
    "another thread calls": """
args, kwargs = s.batch($n, $length)
with ThreadPoolExecutor(1) as another:
    result = another.submit(s.model, *args, **kwargs).result()
s.see(result)
s.loss(result).backward()
""",
    "another thread runs the backward": """
args, kwargs = s.batch($n, $length)
loss = s.loss(s.model(*args, **kwargs))
with ThreadPoolExecutor(1) as another:
    another.submit(loss.backward).result()
""",
    "the module itself is called": """
args, kwargs = s.batch($n, $length)
out = s.inner()(*args, **kwargs)
s.see(out)
s.loss(out).backward()
""",
    # The forward of a wrapper calls the module with its hooks, as DistributedDataParallel's does.
    "forward is called": """
s.inner()._forward_hooks.clear()
s.inner()._forward_pre_hooks.clear()
args, kwargs = s.batch($n, $length)
out = s.model.forward(*args, **kwargs)
s.see(out)
s.loss(out).backward()
""",
    "a part is called": """
part = next(iter(s.model.children()))
s.see(sorted(n for n, _ in part.named_parameters()))
args, kwargs = s.batch($n, $length)
try:
    s.see(part(*args))
except (TypeError, RuntimeError):
    s.see("not for these")
""",
    "anomaly mode": """
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with torch.autograd.detect_anomaly():
        args, kwargs = s.batch($n, $length)
        s.loss(s.model(*args, **kwargs)).backward()
""",
    "deterministic algorithms": """
torch.use_deterministic_algorithms(True)
try:
    args, kwargs = s.batch($n, $length)
    s.loss(s.model(*args, **kwargs)).backward()
finally:
    torch.use_deterministic_algorithms(False)
""",
    "another default dtype": """
torch.set_default_dtype(torch.float64)
try:
    args, kwargs = s.batch($n, $length)
    out = s.model(*args, **kwargs)
    s.see(out)
    s.loss(out).backward()
finally:
    torch.set_default_dtype(torch.float32)
""",
    "saved tensors on hooks": """
args, kwargs = s.batch($n, $length)
with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
    loss = s.loss(s.model(*args, **kwargs))
loss.backward()
""",
    "not a number in the batch": """
args, kwargs = s.batch($n, $length)
if args[0].is_floating_point():
    args[0].flatten()[0] = float("nan")
with torch.no_grad():
    s.see(s.model(*args, **kwargs))
""",
    "hook on the whole while it is called": """
heard = []
handles = [
    s.model.register_forward_pre_hook(lambda m, args: heard.append(len(args))),
    s.model.register_forward_hook(lambda m, args, out: heard.append(len(args))),
    s.model.register_full_backward_hook(lambda m, gi, go: heard.append([g is None for g in go])),
]
args, kwargs = s.batch($n, $length)
s.loss(s.model(*args, **kwargs)).backward()
for handle in handles:
    handle.remove()
s.see(heard)
""",
    "global hook on modules": """
heard = []
def listen(module, args, out):
    heard.append(len(args))
handle = torch.nn.modules.module.register_module_forward_hook(listen)
try:
    args, kwargs = s.batch($n, $length)
    out = s.model(*args, **kwargs)
finally:
    handle.remove()  # it would have all later scripts run in PyTorch
s.see(out)
s.see(len(heard) > 0)
s.loss(out).backward()
""",
    "seed and repeat": """
torch.manual_seed(5)
args, kwargs = s.batch($n, $length)
with torch.no_grad():
    s.see(s.model(*args, **kwargs))
if not s.draws():
    s.see(torch.rand(2))
""",
}

# What a script changes between calls.
CHANGES = {
    "freeze a parameter": "s.parameter($which).requires_grad_(False)",
    "unfreeze all": "s.model.requires_grad_(True)",
    "freeze all": "s.model.requires_grad_(False)",
    "freeze a part": "s.part($which).requires_grad_(False)",
    "unfreeze a part": "s.part($which).requires_grad_(True)",
    "zero_grad to None": "s.model.zero_grad(set_to_none=True)",
    "zero_grad to zeros": "s.model.zero_grad(set_to_none=False)",
    "another optimizer, SGD": """
s.optimizer = torch.optim.SGD(s.model.parameters(), lr=$rate, momentum=0.9)
""",
    "another optimizer, FusedAdam": """
s.optimizer = FusedAdam(s.model.parameters(), lr=$rate * 0.1, eps=1e-2, weight_decay=0.01)
""",
    # With roundings of gradients that are zero, a small epsilon makes steps of full length.
    "another optimizer, AdamW": """
s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=$rate * 0.1, eps=1e-2)
""",
    "another optimizer, fused": """
s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=$rate * 0.1, eps=1e-2, fused=True)
""",
    "another learning rate": """
for group in s.optimizer.param_groups:
    group["lr"] = $rate * 0.2
""",
    "optimizer's state is loaded": """
s.optimizer.load_state_dict(copy.deepcopy(s.optimizer.state_dict()))
""",
    "optimizer's state is dropped": "s.optimizer.state.clear()",
    "load_state_dict": """
state = s.model.state_dict()
state = {k: v.detach() * 0.9 if v.is_floating_point() else v for k, v in state.items()}
s.see(str(s.model.load_state_dict(state)))
""",
    "load_state_dict, assigned": """
state = {k: v.detach().clone() for k, v in s.model.state_dict().items()}
s.model.load_state_dict(state, assign=True)
""",
    "load_state_dict that is refused": """
state = dict(s.model.state_dict())
state.pop(next(iter(state)))
s.model.load_state_dict(state)
""",
    "load_state_dict, not strict": """
state = {k: v.detach() * 0.8 for k, v in list(s.model.state_dict().items())[:1]}
s.see(len(s.model.load_state_dict(state, strict=False).missing_keys))
""",
    "weights made anew": """
with torch.no_grad():
    for p in s.model.parameters():
        p.copy_(torch.randn_like(p) * 0.5)
""",
    "weights through data": "s.parameter($which).data.mul_(0.5)",
    "data is assigned": """
p = s.parameter($which)
p.data = torch.randn_like(p)
""",
    "data of another size": """
p = s.parameter($which)
# PyTorch reads past the ends of what is parametrized, as it is now and was of old.
if not any(parametrize.is_parametrized(m) or hasattr(m, "weight_g") for m in s.inner().modules()):
    p.data = torch.cat([p.data, p.data])
""",
    "gradient is assigned": """
p = s.parameter($which)
if p.requires_grad:
    p.grad = torch.ones_like(p)
""",
    "another Parameter": """
owner, name = s.place($which)
setattr(owner, name, torch.nn.Parameter(torch.randn_like(getattr(owner, name)) * 0.5))
""",
    "a Parameter that does not train": """
owner, name = s.place($which)
old = getattr(owner, name).detach()
setattr(owner, name, torch.nn.Parameter(old.clone(), requires_grad=False))
""",
    "a parameter becomes a buffer": """
owner, name = s.place($which)
old = getattr(owner, name).detach().clone()
delattr(owner, name)
owner.register_buffer(name, old)
""",
    "another part": """
owner, name = s.seat($which)
setattr(owner, name, copy.deepcopy(getattr(owner, name)))
""",
    "another Linear": """
for owner, name, layer in s.linears()[:1]:
    made = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    setattr(owner, name, made.to(layer.weight.dtype))
""",
    "a part around a part": """
for owner, name, layer in s.linears()[-1:]:
    setattr(owner, name, torch.nn.Sequential(layer, torch.nn.GELU()))
""",
    "LoRA around a part": """
for owner, name, layer in s.linears()[:1]:
    setattr(owner, name, Lora(layer))
""",
    "a part becomes Identity": """
for owner, name, layer in s.linears()[-1:]:
    if layer.in_features == layer.out_features:
        setattr(owner, name, torch.nn.Identity())
""",
    "a Parameter is added": """
s.model.register_parameter("added", torch.nn.Parameter(torch.ones(2)))
""",
    "a buffer is added": """
s.model.register_buffer("table_of_mine", torch.ones(2))
""",
    "a part is added": """
s.model.add_module("part_of_mine", torch.nn.Linear(2, 2).to(s.dtype))
""",
    "what was added is deleted": """
for name in ("added", "table_of_mine", "part_of_mine"):
    if hasattr(s.model, name):
        delattr(s.model, name)
""",
    "a part is deleted": """
owner, name = s.seat($which)
s.removed = getattr(owner, name)
delattr(owner, name)
args, kwargs = s.batch($n, $length)
try:
    s.see(s.model(*args, **kwargs))
finally:
    setattr(owner, name, s.removed)
""",
    "a part comes last": """
owner, name = s.seat($which)
owner._modules[name] = owner._modules.pop(name)
""",
    "the first part comes last": """
parts = s.part($which)._modules
if parts:
    first = next(iter(parts))
    parts[first] = parts.pop(first)
""",
    "a parameter comes last": """
owner, name = s.place($which)
owner._parameters[name] = owner._parameters.pop(name)
""",
    "buffers are turned round": """
for part in s.inner().modules():
    for name in [*part._buffers][-2::-1]:
        part._buffers[name] = part._buffers.pop(name)
""",
    "bias becomes None": """
for _, _, layer in s.linears()[:1]:
    layer.bias = None
""",
    "hook on a part": """
s.handles.append(s.part($which).register_forward_hook(lambda m, args, out: None))
""",
    "hook on a part that changes its output": """
def doubled(m, args, out):
    if isinstance(out, torch.Tensor) and not isinstance(m, nn.Dropout):
        return out * 2  # what scripts compute is the same for all masks of ones
s.handles.append(s.part($which).register_forward_hook(doubled))
""",
    "hook before a part": """
s.handles.append(s.part($which).register_forward_pre_hook(lambda m, args: None))
""",
    # "a hook on the wrapped module or on one inside it" runs in PyTorch, so that it is heard.
    "backward hook on a part": """
s.handles.append(s.part($which).register_full_backward_hook(lambda m, gi, go: None))
""",
    "hook on a parameter": """
p = s.parameter($which)
if p.requires_grad:
    s.handles.append(p.register_hook(lambda gradient: gradient * 0.5))
""",
    "hook behind a parameter's gradient": """
p = s.parameter($which)
if p.requires_grad:
    def halve(p):  # which returns nothing, as it must
        p.grad.mul_(0.5)
    s.handles.append(p.register_post_accumulate_grad_hook(halve))
""",
    "hooks are removed": """
for handle in s.handles:
    handle.remove()
s.handles.clear()
""",
    "parametrize": """
for _, _, layer in s.linears()[:1]:
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Halved())
""",
    "parametrization is removed": """
for part in s.model.modules():
    if torch.nn.utils.parametrize.is_parametrized(part, "weight"):
        torch.nn.utils.parametrize.remove_parametrizations(part, "weight")
        break
""",
    "weight norm of old": """
for _, _, layer in s.linears()[:1]:
    if "weight" in layer._parameters and "weight_g" not in layer._parameters:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.nn.utils.weight_norm(layer)
""",
    "pruning": """
for _, _, layer in s.linears()[:1]:
    if "weight" in layer._parameters:
        torch.nn.utils.prune.l1_unstructured(layer, "weight", amount=0.3)
""",
    "weights are tied": """
found = s.linears()
for _, _, a in found:
    for _, _, b in found:
        alike = a is not b and {"weight"} <= a._parameters.keys() & b._parameters.keys()
        if alike and a.weight.shape == b.weight.shape:
            a.weight = b.weight
""",
    "weights are untied": """
for part in s.model.modules():
    if part._parameters.get("weight") is not None:
        part.weight = torch.nn.Parameter(part.weight.detach().clone())
""",
    "biases are tied": """
found = [m for _, _, m in s.linears() if m.bias is not None]
for a, b in zip(found, found[1:]):
    if a.bias.shape == b.bias.shape:
        a.bias = b.bias
""",
    "double": """
s.model.double()
s.dtype = torch.float64
s.fresh_optimizer()
""",
    "a parameter shares memory with another": """
p = s.parameter($which)
p.data = p.data.clone()
flat = torch.cat([q.detach().flatten() for q in s.model.parameters() if q.dtype == p.dtype])
at = 0
for q in s.model.parameters():
    if q.dtype == p.dtype:
        q.data = flat[at : at + q.numel()].view(q.shape)
        at += q.numel()
""",
    "parameters lie transposed": """
for p in s.model.parameters():
    if p.dim() == 2:
        p.data = p.data.t().contiguous().t()
""",
    "half and back": "s.model.half().to(s.dtype)",
    "bfloat16 and back": "s.model.bfloat16().to(s.dtype)",
    "to the same device": "s.model.to('cpu')",
    "double and back": """
kept = s.dtype
s.model.double()
args, kwargs = s.batch($n, $length, torch.float64)
s.see(s.model(*args, **kwargs))
s.model.to(kept)
""",
    "EMA": """
ema = copy.deepcopy(s.model)
with torch.no_grad():
    for p, q in zip(ema.parameters(), s.model.parameters()):
        p.lerp_(q, 0.5)
ema.eval()
args, kwargs = s.batch($n, $length)
with torch.no_grad():
    s.see(ema(*args, **kwargs))
""",
    "EMA of the module itself": """
ema = copy.deepcopy(s.inner()).requires_grad_(False)
for p, q in zip(ema.parameters(), s.model.parameters()):
    p.mul_(0.5).add_(q.detach(), alpha=0.5)
args, kwargs = s.batch($n, $length)
s.see(ema(*args, **kwargs))
""",
    "AveragedModel": """
averaged = torch.optim.swa_utils.AveragedModel(s.model)
averaged.update_parameters(s.model)
averaged.update_parameters(s.model)
args, kwargs = s.batch($n, $length)
with torch.no_grad():
    s.see(averaged(*args, **kwargs))
""",
    "the copy goes on": """
s.model = copy.deepcopy(s.model)
s.fresh_optimizer()
""",
    "pickle goes on": """
s.model = pickle.loads(pickle.dumps(s.model))
s.fresh_optimizer()
""",
    "save and load go on": """
file = io.BytesIO()
torch.save(s.model, file)
file.seek(0)
s.model = torch.load(file, weights_only=False)
s.fresh_optimizer()
""",
    "checkpoint is saved and loaded": """
file = io.BytesIO()
torch.save({"model": s.model.state_dict(), "optimizer": s.optimizer.state_dict()}, file)
file.seek(0)
saved = torch.load(file)
s.model.load_state_dict(saved["model"])
s.optimizer.load_state_dict(saved["optimizer"])
""",
    "keys": """
s.see(list(s.model.state_dict()))
s.see([n for n, _ in s.model.named_parameters()])
s.see([n for n, _ in s.model.named_buffers()])
s.see([n for n, _ in s.model.named_modules()][1:])
s.see([type(s.unwrap(m)).__name__ for m in s.model.children()])
s.see(sum(p.numel() for p in s.model.parameters()))
s.see(next(s.model.parameters()).dtype)
""",
    "apply": """
def start(m):
    if isinstance(m, torch.nn.Linear) and "weight" in m._parameters:
        torch.nn.init.uniform_(m.weight, -0.3, 0.3)
s.model.apply(start)
""",
    "train": "s.model.train()",
    "train(False)": "s.model.train(False)",
    "a part is switched to evaluation": "s.part($which).eval()",
    "a part is switched to training": "s.part($which).train()",
    "training is assigned": "s.model.training = False",
    "an attribute is turned": """
for name in ("flag", "enabled"):
    if hasattr(s.model, name):
        setattr(s.model, name, not getattr(s.model, name))
""",
    "an attribute grows": """
if hasattr(s.model, "scale"):
    s.model.scale += $rate
    s.model.settings["shift"] -= $rate
""",
    "a whole number changes": """
if hasattr(s.model, "depth"):
    s.model.depth = 1 + $which % 3
if hasattr(s.model, "active"):
    s.model.active = $which % 2
""",
    "a constant of a part changes": """
for part in s.model.modules():
    if isinstance(part, (torch.nn.LayerNorm, torch.nn.BatchNorm2d)):
        part.eps = 1e-3
    if isinstance(part, torch.nn.BatchNorm2d):
        part.momentum = 0.3
    if isinstance(part, torch.nn.Embedding):
        part.max_norm = None
""",
    "a buffer changes in place": """
for b in s.model.buffers():
    if b.is_floating_point():
        b.mul_(0.5)
""",
    "a buffer is assigned": """
for part in s.model.modules():
    for name, b in list(part._buffers.items()):
        if b is not None and b.is_floating_point():
            setattr(part, name, b * 0.5)
""",
    "a tensor in a list changes": """
if hasattr(s.model, "constant"):
    s.model.constant[0] = s.model.constant[0] * 2
    s.model.constant[0][0] = 5
""",
    "forward is replaced": """
inner = s.inner()
old = type(inner).forward
def forward(*args, **kwargs):
    return old(inner, *args, **kwargs)
inner.forward = forward
args, kwargs = s.batch($n, $length)
try:
    s.see(s.model(*args, **kwargs))
finally:
    del inner.forward
""",
    "a forward is patched on the class": """
kind = type(s.inner())
old = kind.forward
def doubled(self, *args, **kwargs):
    out = old(self, *args, **kwargs)
    return out * 2 if isinstance(out, torch.Tensor) else out
kind.forward = doubled
args, kwargs = s.batch($n, $length)
try:
    out = s.model(*args, **kwargs)
    s.see(out)
    s.loss(out).backward()
finally:
    kind.forward = old
""",
    "wrapped again": "s.model = s.wrap(s.inner())\ns.fresh_optimizer()",
    "a second wrapper shares the module": """
other = s.wrap(s.inner())
args, kwargs = s.batch($n, $length)
s.loss(other(*args, **kwargs)).backward()
s.look()
s.loss(s.model(*args, **kwargs)).backward()
""",
    "two models share weights": """
other = s.wrap(copy.deepcopy(s.inner()))
shared = {k: v for k, v in s.model.named_parameters()}
for owner, name, key in s.places_of(other):
    setattr(owner, name, shared[key])
args, kwargs = s.batch($n, $length)
(s.loss(s.model(*args, **kwargs)) + s.loss(other(*args, **kwargs))).backward()
""",
    "inside another module": """
outer = torch.nn.Sequential(s.model)
args, kwargs = s.batch($n, $length)
if not kwargs and len(args) == 1:
    out = outer(*args)
    s.see(out)
    s.see(list(outer.state_dict()))
    s.loss(out).backward()
""",
    "inside another wrapper": """
outer = s.wrap(Around(s.model))
args, kwargs = s.batch($n, $length)
out = outer(*args, **kwargs)
s.see(out)
s.see(list(outer.state_dict()))
s.loss(out).backward()
""",
    # "A checkpoint in a module, around a part that is an ORTModule of its own inside of another
    # one, raises PyTorch's `CheckpointError`" where second derivatives are taken.
    "a part is wrapped": """
owner, name = s.seat($which)
part = getattr(owner, name)
lists = (torch.nn.ModuleList, torch.nn.ParameterList, torch.nn.ParameterDict)
if not isinstance(part, lists) and not isinstance(owner, Recomputed):
    setattr(owner, name, s.wrap(part))
""",
    "vector of parameters": """
vector = torch.nn.utils.parameters_to_vector(s.model.parameters())
torch.nn.utils.vector_to_parameters(vector.detach() * 0.9, s.model.parameters())
""",
    "swapped under a context": """
kept = {k: v.detach().clone() for k, v in s.model.state_dict().items()}
with torch.no_grad():
    for p in s.model.parameters():
        p.mul_(0.5)
    args, kwargs = s.batch($n, $length)
    s.see(s.model(*args, **kwargs))
s.model.load_state_dict(kept)
""",
    "threads are set": "torch.set_num_threads(1)",
    "collection": "gc.collect()",
    "no gradient at all": """
for p in s.model.parameters():
    p.grad = None
""",
}

ACTIONS = {**CALLS, **CHANGES}
