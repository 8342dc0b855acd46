"""Functions of selected rows; no test module, whose assertions pytest rewrites."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

Function = Callable[[Tensor, Tensor], Tensor]  # of (rows, 3) and a mask of the rows


def _returns_early(y: Tensor, m: Tensor) -> Tensor:
    rows = y[m]
    if rows.shape[0] == 0:
        return y.sum() * 0
    return F.cross_entropy(rows, rows.argmax(1).detach() * 0)


def _adds_if_any(y: Tensor, m: Tensor) -> Tensor:
    loss, rows = y.square().mean(), y[m]
    if len(rows) > 0:
        loss = loss + rows.mean()
    return loss


def _treats_one_apart(y: Tensor, m: Tensor) -> Tensor:
    rows = y[m]
    if rows.size(0) < 2:
        return y * 3
    return (rows - rows.mean(0)) / rows.std(0)


def _raises_for_none(y: Tensor, m: Tensor) -> Tensor:
    places = m.nonzero()
    if not places.numel():
        raise ValueError("nothing is selected")
    return y[places[:, 0]]


def _asserts_some(y: Tensor, m: Tensor) -> Tensor:
    rows = y[m]
    assert rows.shape[0] >= 1, "nothing is selected"
    return rows.exp()


def _checks_pairs(y: Tensor, m: Tensor) -> Tensor:
    rows = y[m]
    torch._check(rows.shape[0] % 2 == 0, lambda: "not in pairs")
    return rows.reshape(-1, 6)


def _writes_each_its_way(y: Tensor, m: Tensor) -> Tensor:
    result = torch.zeros_like(y)
    result[~m] = y[~m]
    result[m] = y[m].cumsum(0)
    return result


GRAPHS: dict[str, Function] = {
    "squeeze": lambda y, m: y[m].squeeze(),
    "squeeze of a dimension": lambda y, m: y[m].squeeze(0),
    "behind a dimension": lambda y, m: y.T[:, m],
    "behind two dimensions": lambda y, m: y.T[None][..., m] * 2,
    "beside an index": lambda y, m: y[:, None].expand(-1, 2, -1)[m, 1],
    "two axes behind a dimension": lambda y, m: y.T[:, :, None].expand(-1, -1, 2)[
        :, torch.stack([m, ~m], 1)
    ],
    "squeeze of dimensions": lambda y, m: y[m][:, None].squeeze((0, 1)),
    "squeeze of the last": lambda y, m: y[m].T.squeeze(-1),
    "places, squeezed": lambda y, m: y[m.nonzero().squeeze()],
    "places": lambda y, m: y[m.nonzero()[:, 0]],
    "index_select": lambda y, m: y.index_select(0, m.nonzero()[:, 0]),
    "masked_select": lambda y, m: y.masked_select(m[:, None]),
    "beside a row": lambda y, m: y[m] + y[:1],
    "beside itself": lambda y, m: y[m] * y[m],
    "two masks": lambda y, m: y[m] + y[~m],
    "outer product": lambda y, m: y[m][:, None] * y[m][None],
    "matmul": lambda y, m: y[m] @ y.T,
    "matrix by vector": lambda y, m: y[m] @ y[0],
    "vector by matrix": lambda y, m: y[:, 0][m] @ y[m],
    "bmm": lambda y, m: torch.bmm(y[m][None], y.T[None]),
    "sum": lambda y, m: y[m].sum(),
    "mean": lambda y, m: y[m].mean(0),
    "std": lambda y, m: y[m].std(0),
    "max": lambda y, m: y[m].max(0).values,
    "softmax": lambda y, m: y[m].softmax(0),
    "cumsum": lambda y, m: y[m].cumsum(0),
    "layer_norm": lambda y, m: F.layer_norm(y[m], (3,)),
    "batch_norm": lambda y, m: F.batch_norm(y[m], None, None, training=True),
    "cross_entropy": lambda y, m: F.cross_entropy(y[m], y[m].argmax(1).detach() * 0),
    "padded": lambda y, m: F.pad(y[m], (0, 0, 1, 0)),
    "expanded": lambda y, m: y[m].mean(0, keepdim=True).expand(4, 3),
    "where": lambda y, m: torch.where(y[m] > 0, y[m], y[:1]),
    "cat": lambda y, m: torch.cat([y[m], y]),
    "stack": lambda y, m: torch.stack([y[m], y[m]]),
    "view": lambda y, m: y[m].view(-1, 1, 3),
    "view in pairs": lambda y, m: y[m].view(2, -1, 3),
    "flatten": lambda y, m: y[m].flatten(),
    "first": lambda y, m: y[m][0],
    "but the first": lambda y, m: y[m][1:],
    "written back": lambda y, m: y.index_put((m,), y[m] * 2),
    "each written its way": _writes_each_its_way,
    "written elsewhere": lambda y, m: y.index_put((m,), y[~m] * 2),
    "pairs of places": lambda y, m: y[m.nonzero()[:, 0], (~m).nonzero()[:, 0] % 3],
    "adaptive pool": lambda y, m: F.adaptive_max_pool1d(y[m].T[None], 1).double(),
    "einsum": lambda y, m: torch.einsum("ij,kj->ik", y[m], y),
    "cosine similarity": lambda y, m: F.cosine_similarity(y[m], y[:1]),
    "of all pairs": lambda y, m: F.cosine_similarity(y[m][:, None], y[m][None], dim=-1),
    "nearest": lambda y, m: (y[m][:, None] - y[None]).square().sum(-1).min(1).values,
    "tiled": lambda y, m: y[m].tile(2, 2),
    "rolled": lambda y, m: y[m].roll(1, 0),
    "sorted": lambda y, m: y[m].sort(0).values,
    "topk": lambda y, m: y[m].topk(2, 1).values,
    "logsumexp": lambda y, m: y[m].logsumexp(0),
    "prod": lambda y, m: y[m].prod(0),
    "unfolded": lambda y, m: y[m].unfold(1, 2, 1),
    "group_norm": lambda y, m: F.group_norm(y[m], 1),
    "instance_norm": lambda y, m: F.instance_norm(y[m].T[None]),
    "attention": lambda y, m: F.scaled_dot_product_attention(y[m][None], y[None], y[None]),
    "mse": lambda y, m: F.mse_loss(y[m], torch.ones_like(y[m])),
    "divided": lambda y, m: y[m].sum() / max(y[m].shape[0], 1),
    "half of them": lambda y, m: y[m][: y[m].shape[0] // 2],
    "the last": lambda y, m: y[m][-1],
    "numbered": lambda y, m: y[m] * torch.arange(y[m].shape[0])[:, None],
    "triangle": lambda y, m: (y[m] @ y[m].T).tril(),
    "selected twice": lambda y, m: y[m][y[m][:, 0] > 0],
    "elements": lambda y, m: y[y > 0],
    "added to zeros": lambda y, m: torch.zeros_like(y).index_add(0, m.nonzero()[:, 0], y[m]),
    "padded to nine": lambda y, m: F.pad(y[m].T, (0, 9 - y[m].shape[0])),
    "returns early": _returns_early,
    "adds if any": _adds_if_any,
    "treats one apart": _treats_one_apart,
    "raises for none": _raises_for_none,
    "asserts some": _asserts_some,
    "checks pairs": _checks_pairs,
}
