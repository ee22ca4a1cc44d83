"""From a command line to what `up` starts: the one place that reads the environment and files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.launcher.options.build import build
from services.launcher.options.command_line import read_command_line
from services.launcher.options.deployment import Deployment
from services.launcher.options.environment import read_environment
from services.launcher.options.facts import ModelFacts, read_facts
from services.launcher.options.judge import judge
from services.launcher.options.passing import service_flags
from services.launcher.ranks import Layout, check_fit, num_cores
from services.launcher.settings import UpSettings
from shared.config import parse
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What to start.

    Attributes:
        settings: Of `up`.
        service_flags: Service -> further words of its command line.
        lines: What the user must know.
        layout: Ranks of the worker.
        num_frontends: HTTP processes.
    """

    settings: UpSettings
    service_flags: Mapping[str, tuple[str, ...]]
    lines: tuple[str, ...]
    layout: Layout
    num_frontends: int = 1


def read_start(argv: Sequence[str], variables: Mapping[str, str]) -> Start:
    """Read a command line of `up`, with the options of `vllm serve` in it.

    Args:
        argv: Words after `glm-mesh up` (or `vllm serve`).
        variables: The environment. Settings of `up` read the process's own.

    Raises:
        ConfigError: Something is wrong, in conflict or not built: all of it, a line each.
    """
    line = read_command_line(argv)
    problems = list(line.problems)
    settings: UpSettings | None = None
    try:
        settings = parse(UpSettings, line.rest, prog="glm-mesh up")
    except ConfigError as error:
        problems.append(str(error))
    built = build(line.values, variables)
    environment, wrong_variables = read_environment(variables)
    # With settings that have no sense the options are still looked at: one start tells everything.
    asked = Deployment(
        flags=built.flags,
        settings=settings or UpSettings.model_construct(),
        environment=environment,
        model=read_facts(settings.checkpoint) if settings else ModelFacts(),
        origins=built.origins,
    )
    verdict = judge(asked)
    problems += [*built.problems, *wrong_variables, *verdict.refusals]
    layout = _layout(verdict.deployment)
    problems += _misfits(layout, asked, num_cores())
    if problems or settings is None:
        raise ConfigError(_as_one(problems))
    return Start(
        settings=settings,
        service_flags=service_flags(verdict.deployment),
        lines=(*line.lines, *built.lines, *verdict.lines),
        layout=layout,
        num_frontends=verdict.deployment.flags.api_server_count or 1,
    )


def _layout(left: Deployment) -> Layout:
    flags = left.flags
    return Layout(
        tensor_parallel_size=flags.tensor_parallel_size,
        pipeline_parallel_size=flags.pipeline_parallel_size,
        data_parallel_size=flags.data_parallel_size,
        enable_expert_parallel=flags.enable_expert_parallel,
        layer_partition=tuple(left.environment.VLLM_PP_LAYER_PARTITION or ()),
        enable_dsa_cp=flags.additional_config.enable_dsa_cp,
        enable_flashcomm1=flags.additional_config.enable_flashcomm1,
        num_schedulers=left.settings.scheduler_count,
    )


def _misfits(layout: Layout, asked: Deployment, cores: int) -> list[str]:
    visible = asked.environment.ASCEND_RT_VISIBLE_DEVICES
    try:
        check_fit(layout, device=asked.settings.device, visible_devices=visible, num_cores=cores)
    except ConfigError as error:
        return [str(error)]
    return []


def _as_one(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join([f"{len(problems)} options are wrong or not served:", *problems])
