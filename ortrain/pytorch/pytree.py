"""Containers of containers, taken apart into their leaves and put together again.

Private: ``torch.utils._pytree``, which the whole of PyTorch goes by and which has no public name:
what a user has registered with ``torch.export.register_dataclass``, and what transformers has, is
known there alone. Without it the import fails.
"""

from torch.utils import _pytree

GetAttrKey = _pytree.GetAttrKey
TreeSpec = _pytree.TreeSpec
register_pytree_node = _pytree.register_pytree_node
tree_flatten = _pytree.tree_flatten
tree_flatten_with_path = _pytree.tree_flatten_with_path
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only
tree_unflatten = _pytree.tree_unflatten
