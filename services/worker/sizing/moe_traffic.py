"""How tokens reach their experts, and what the fused exchange wants of HCCL_BUFFSIZE.

The method is chosen for each step from numbers that all ranks share. An exchange by `MC2` happens
in a window of fixed size that lies in the buffer of a communicator of its own.
"""

from services.worker.parallel.moe_method import MoeMethod, MoeRules
from services.worker.sizing.deployment import Deployment
from services.worker.sizing.hardware import MIB


def moe_rules(deployment: Deployment) -> MoeRules:
    """What the choice of a deployment's methods depends on."""
    captured = deployment.captured()
    return MoeRules(
        hardware=deployment.hardware.name,
        ep_size=deployment.topology.expert_parallel_size,
        tp_size=deployment.topology.tensor_parallel_size,
        num_experts=deployment.config.n_routed_experts,
        num_experts_per_tok=deployment.config.num_experts_per_tok,
        mc2_tokens=captured[-1] if captured else deployment.decode_tokens,
    )


def has_mc2(deployment: Deployment) -> bool:
    """Whether the fused exchange exists in this layout at all."""
    return moe_rules(deployment).has_mc2


def mc2_capacity(deployment: Deployment) -> int:
    """Most tokens of a replica's step that go by the fused exchange."""
    return moe_rules(deployment).capacity


def moe_method(deployment: Deployment, num_tokens: int) -> MoeMethod:
    """The method of a step whose largest replica has `num_tokens`."""
    return moe_rules(deployment).choose(num_tokens)


def moe_methods(deployment: Deployment) -> set[MoeMethod]:
    """The ways that tokens take to their experts in the smallest and the largest step."""
    return {moe_method(deployment, size) for size in (1, deployment.max_num_batched_tokens)}


def mc2_shortage_mib(deployment: Deployment) -> int:
    """The HCCL_BUFFSIZE that the fused exchange needs, where it is set too small; else 0."""
    if not deployment.hardware.is_npu or MoeMethod.MC2 not in moe_methods(deployment):
        return 0
    needed = mc2_window_mib(deployment)
    return needed if needed > deployment.hccl_mib else 0


def mc2_window_mib(deployment: Deployment) -> int:
    """Least HCCL_BUFFSIZE, MiB, for the largest step that goes by the fused exchange.

    CANN's conditions on npu_moe_distribute_dispatch_v2: on A3 a slot of 12,800 bytes for every
    token of every rank and expert here, on A2 for every token and choice.
    """
    if not has_mc2(deployment):
        return 0
    config, topology = deployment.config, deployment.topology
    ranks, choices = topology.expert_parallel_size, config.num_experts_per_tok
    tokens = -(-mc2_capacity(deployment) // topology.tensor_parallel_size)
    experts = -(-config.n_routed_experts // ranks)
    row = 2 * config.hidden_size
    if deployment.hardware.name == "a3":
        arriving = experts * tokens * ranks * _aligned(_aligned(row, 32) + 64, 512)
        returning = (choices + config.n_shared_experts) * tokens * _aligned(row, 512)
        needed = 2 * (arriving + returning)
    else:
        needed = 2 * (tokens * ranks * min(experts, choices) * row + 2 * MIB)
    return -(-needed // MIB)


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
