"""How tokens reach their experts, and what the fused exchange wants of HCCL_BUFFSIZE.

The method is chosen for each step from numbers that all ranks share. An exchange by `MC2` happens
in a window of fixed size that lies in the buffer of a communicator of its own.
"""

from services.worker.parallel.hccl import Mc2Window
from services.worker.parallel.moe_method import MoeMethod, MoeRules
from services.worker.sizing.deployment import Deployment


def moe_rules(deployment: Deployment) -> MoeRules:
    """What the choice of a deployment's methods depends on."""
    captured = deployment.captured()
    config, topology = deployment.config, deployment.topology
    ranks, name = topology.expert_parallel_size, deployment.hardware.name
    window = Mc2Window(
        is_a3=name == "a3",
        buffer_mib=deployment.hccl_mib,
        num_ranks=ranks,
        num_experts=-(-config.n_routed_experts // ranks),
        num_choices=config.num_experts_per_tok,
        num_shared_experts=config.n_shared_experts,
        hidden_size=config.hidden_size,
    )
    return MoeRules(
        hardware=name,
        ep_size=ranks,
        tp_size=topology.tensor_parallel_size,
        num_experts=config.n_routed_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        mc2_tokens=captured[-1] if captured else deployment.decode_tokens,
        window=window if deployment.hardware.is_npu else None,
    )


def has_mc2(deployment: Deployment) -> bool:
    """Whether any step goes by the fused exchange."""
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
    """The HCCL_BUFFSIZE with which all decode steps go by the fused exchange, if more; else 0."""
    needed = mc2_window_mib(deployment)
    return needed if needed > deployment.hccl_mib else 0


def mc2_window_mib(deployment: Deployment) -> int:
    """Least HCCL_BUFFSIZE for the largest step that should go by the fused exchange; 0: none."""
    rules = moe_rules(deployment)
    return rules.needed_mib if rules.takes_mc2 else 0
