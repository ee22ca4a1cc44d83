"""The life of a generation request, the same for all endpoints.

    admit -> read body -> parse -> plan (render, resolve) -> submit -> verdict -> answer

The head of the answer waits for the verdict, so a refusal is an HTTP status. Everything taken on
the way is given back by the visit's cleanup.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from services.frontend.admission import Place
from services.frontend.background import Answer, KeptAnswer
from services.frontend.bodies import Body, read_body
from services.frontend.exchange import Exchange
from services.frontend.fields import unknown_header
from services.frontend.framing import CHUNKS, Framing
from services.frontend.gateway import Gateway
from services.frontend.streams import StreamAnswer
from services.frontend.submission import Submission
from services.frontend.visit import Visit, visit_of
from shared.errors import FailureReason, RequestError

# Beyond the time the mesh itself allows a request, for its own end to arrive.
BACKSTOP_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request ready to be submitted, the body fields that nobody knows, and what comes after."""

    submission: Submission
    unknown_fields: list[str]
    framing: Framing = CHUNKS
    # Where the finished object goes besides to the client.
    kept: KeptAnswer | None = None
    # The client does not wait: it gets the object as it is and asks for it later.
    is_background: bool = False


Planner = Callable[[Gateway, Body, Visit], Awaitable[Plan]]


async def serve(gateway: Gateway, request: Request, plan_request: Planner) -> Response:
    """One request from its headers to its answer."""
    visit = visit_of(request.scope)
    exchange, wanted = await _submit(gateway, request, plan_request, visit)
    visit.cleanup.callback(_settle, gateway, exchange, visit)
    await _wait_for_verdict(exchange, gateway.settings.verdict_timeout_s)
    if wanted.is_stream:
        return StreamAnswer(
            exchange,
            detokenizers=gateway.detokenizers,
            keeper=gateway.keeper,
            framing=wanted.framing,
            kept=wanted.kept,
            headers=wanted.headers,
            on_first_bytes=lambda: gateway.metrics.observe_first_bytes(visit.age_s),
        )
    limit_s = gateway.settings.request_timeout_s + BACKSTOP_S

    async def answer() -> bytes:
        return await whole_answer(exchange, limit_s)

    if wanted.is_background:
        assert wanted.kept is not None
        going_on = Answer(wait=answer, fail=exchange.fail)
        body = await gateway.background.go_on(going_on, wanted.kept, visit)
    else:
        body = await answer()
        if wanted.kept is not None:
            await wanted.kept.keep(body)
    return Response(body, headers=wanted.headers, media_type="application/json")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What is left of a plan once its submission has been handed on."""

    headers: dict[str, str]
    is_stream: bool
    framing: Framing
    kept: KeptAnswer | None
    is_background: bool


async def admit(gateway: Gateway, request: Request, visit: Visit) -> tuple[Place, Body]:
    """Take a place and read the body; from then on a hang-up cancels the request."""
    place = gateway.admission.enter()
    visit.cleanup.callback(place.leave)
    visit.cleanup.callback(await visit.tenant.quota.enter(time.monotonic))
    body = await read_body(
        request.scope,
        request.receive,
        max_bytes=gateway.settings.max_body_bytes,
        timeout_s=gateway.settings.body_timeout_s,
        hold=place.hold,
    )
    visit.watch(request.receive)
    return place, body


async def _submit(
    gateway: Gateway, request: Request, plan_request: Planner, visit: Visit
) -> tuple[Exchange, _Wanted]:
    """Hand the request on; its body and prompt live no longer than this call."""
    try:
        place, body = await admit(gateway, request, visit)
        plan = await plan_request(gateway, body, visit)
        exchange = gateway.detokenizers.submit(plan.submission)
        place.release_body()
    except RequestError as error:
        gateway.metrics.count_failure(error.reason.name.lower())
        raise
    return exchange, _Wanted(
        headers=unknown_header(plan.unknown_fields),
        is_stream=plan.submission.output.is_stream,
        framing=plan.framing,
        kept=plan.kept,
        is_background=plan.is_background,
    )


async def _wait_for_verdict(exchange: Exchange, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await exchange.wait_for_verdict()
    except TimeoutError:
        late = RequestError(
            FailureReason.UPSTREAM_LOST,
            f"the mesh did not answer within {timeout_s:g} s",
            retry_after_ms=1000,
        )
        exchange.fail(late)
        raise late from None


async def whole_answer(exchange: Exchange, limit_s: float) -> bytes:
    """All bytes after the good end; raises the bad one, or DEADLINE_EXCEEDED."""
    try:
        async with asyncio.timeout(limit_s):
            return await exchange.wait_for_end()
    except TimeoutError:
        late = RequestError(
            FailureReason.DEADLINE_EXCEEDED, f"the request did not end within {limit_s:g} s"
        )
        exchange.fail(late)
        raise late from None


def _settle(gateway: Gateway, exchange: Exchange, visit: Visit) -> None:
    """The end of every submitted request: give it up if it still runs, and count it."""
    gateway.detokenizers.close(exchange)
    if exchange.stats is not None:
        if visit.span is not None:
            visit.span.set("gen_ai.usage.input_tokens", exchange.stats.num_prompt_tokens)
            visit.span.set("gen_ai.usage.output_tokens", exchange.stats.num_output_tokens)
        gateway.metrics.count_success(exchange.finish_reason, exchange.stats, visit.age_s)
        gateway.metrics.count_oddities(exchange.oddities)
    elif exchange.error is not None:
        gateway.metrics.count_failure(exchange.error.reason.name.lower())
