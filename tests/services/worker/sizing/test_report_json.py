import json

from services.worker.sizing.advice import advise
from services.worker.sizing.plan import make_plan
from services.worker.sizing.report_json import as_json
from tests.services.worker.sizing.conftest import MakeDeployment


def test_json_has_bytes_verdict_and_suggestions(make_deployment: MakeDeployment) -> None:
    plan = make_plan(
        make_deployment(
            "dp2,tp8,ep", "w4a8c8", max_model_len=135_000, max_num_seqs=12, num_full_seqs=12
        )
    )
    found = json.loads(json.dumps(as_json(plan, advise(plan))))
    assert found["verdict"] == "starts"
    assert found["fits"] is False
    assert found["deployment"]["topology"] == "dp2,tp8,ep"
    assert found["deployment"]["nodes"] == 1
    assert found["full_sequences"] == plan.num_full_seqs
    (rank,) = found["ranks"]
    assert sum(rank["weights"].values()) == rank["weights_total"]
    taken = rank["weights_total"] + sum(item["bytes"] for item in rank["runtime"])
    assert taken + rank["free_for_kv"] == rank["limit"]
    assert rank["blocks"] == found["blocks"] == rank["free_for_kv"] // rank["bytes_per_block"]
    assert any(item["is_estimate"] for item in rank["runtime"])
    suggestions = found["suggestions"]
    assert all(entry["fits"] for entry in suggestions["enough"])
    assert all(entry["change"] and entry["effect"] for entry in suggestions["enough"])


def test_a_cpu_has_no_limit_and_no_share(make_deployment: MakeDeployment) -> None:
    plan = make_plan(make_deployment("tp1", "bf16", "cpu", kv_cache_bytes=1 << 40))
    found = as_json(plan, advise(plan))
    assert found["ranks"][0]["limit"] is None
    assert found["deployment"]["gpu_memory_utilization"] is None
