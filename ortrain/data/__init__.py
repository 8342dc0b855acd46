"""Which samples a process takes: samplers that give every process about the same work."""

from ortrain.extras import require

require("torch", __name__)

from ortrain.data.sampler import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
