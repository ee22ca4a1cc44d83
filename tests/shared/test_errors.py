import grpc
import pytest

from protos.glm.v1 import common_pb2
from shared.errors import OUTCOMES, FailureReason, GlmMeshError, RequestError


def test_every_reason_has_one_outcome_and_the_number_of_the_contract() -> None:
    assert set(OUTCOMES) == set(FailureReason)
    wire = dict(common_pb2.FailureReason.items())
    unspecified = wire.pop("FAILURE_REASON_UNSPECIFIED")
    assert unspecified == 0
    assert wire == {f"FAILURE_REASON_{r.name}": int(r) for r in FailureReason}


@pytest.mark.parametrize("reason", list(FailureReason))
def test_every_outcome_names_a_real_grpc_status_and_an_error_status(reason: FailureReason) -> None:
    outcome = OUTCOMES[reason]
    assert hasattr(grpc.StatusCode, outcome.grpc_status)
    assert 400 <= outcome.http_status < 600


def test_refusals_that_may_pass_later_are_retryable_and_bad_input_is_not() -> None:
    assert OUTCOMES[FailureReason.QUEUE_FULL].is_retryable
    assert OUTCOMES[FailureReason.UPSTREAM_LOST].is_retryable
    assert not OUTCOMES[FailureReason.INVALID_ARGUMENT].is_retryable
    assert not OUTCOMES[FailureReason.CONTEXT_LENGTH_EXCEEDED].is_retryable


def test_a_feature_that_is_off_conflicts_with_the_deployment_and_is_no_bad_value() -> None:
    # The one row of the contract's table: FAILED_PRECONDITION is 409, on every way out.
    assert OUTCOMES[FailureReason.FEATURE_DISABLED].grpc_status == "FAILED_PRECONDITION"
    assert OUTCOMES[FailureReason.FEATURE_DISABLED].http_status == 409
    by_status = {outcome.grpc_status: outcome.http_status for outcome in OUTCOMES.values()}
    assert all(by_status[o.grpc_status] == o.http_status for o in OUTCOMES.values())


def test_a_request_error_keeps_its_facts() -> None:
    error = RequestError(FailureReason.QUEUE_FULL, "full", field="n", retry_after_ms=250)
    assert isinstance(error, GlmMeshError)
    assert (str(error), error.field, error.retry_after_ms) == ("full", "n", 250)
    assert error.outcome.http_status == 429
