"""Every call of an operator in the worker's source is a site, and knows who reaches it."""

import ast

import torch

from services.worker import ops
from tools.npu_contract.sites import call_at, find_reached, find_sites, operator_calls, sources


def test_sources_are_the_workers_without_its_operators() -> None:
    assert {"model.attention", "drafting.proposer", "sampler"} <= sources().keys()
    assert not any(name.startswith("ops") for name in sources())


def test_calls_are_found_in_the_order_of_the_source() -> None:
    tree = ast.parse("a(torch.ops.npu.x(1))\nb = torch.ops.npu.y(torch.ops.npu.x(2))\n")
    assert [ast.unparse(call.func) for call in operator_calls(tree)] == [
        "torch.ops.npu.x",
        "torch.ops.npu.y",
        "torch.ops.npu.x",
    ]


def test_a_site_leads_to_its_call() -> None:
    for site in find_sites():
        call = call_at(ast.parse(sources()[site.module]), site)
        assert call.lineno == site.line
        assert ast.unparse(call.func) == f"torch.ops.npu.{site.operator}"


def test_each_site_is_reached_with_the_arguments_of_its_call() -> None:
    ops.register()
    for site, runs in find_reached().items():
        schema = getattr(torch.ops.npu, site.operator).default._schema
        names = {argument.name for argument in schema.arguments}
        assert runs, site
        assert all(run.arguments.keys() == names for run in runs)
