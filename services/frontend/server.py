"""The gRPC side of the frontend: Render and Abort for internal clients.

The very rules and the very renderer of the HTTP side. Proto messages stop here.
"""

from typing import Any, Protocol

import msgspec

from protos.glm.v1 import frontend_pb2, frontend_pb2_grpc
from services.frontend.bodies import Body
from services.frontend.chat_plan import conversation_of
from services.frontend.errors import ApiError
from services.frontend.gateway import Gateway
from services.frontend.schemas.chat import ChatRequest
from services.frontend.validation import parse
from shared import rpc, wire
from shared.errors import FailureReason, RequestError

SERVICE_NAME = frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"].full_name


class Invocation(Protocol):
    """What of gRPC's context is used here."""

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...] | None:
        """Headers of the call."""


class FrontendServicer(frontend_pb2_grpc.FrontendServiceServicer):
    """Answers from one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        """Keep the gateway."""
        self._gateway = gateway

    async def Render(
        self, request: frontend_pb2.RenderRequest, context: Invocation
    ) -> frontend_pb2.RenderResponse:
        """Chat in, token ids out."""
        body = chat_body(request)
        try:
            chat = parse(ChatRequest, body)
            whole = Body(body, request.ByteSize())
            conversation, _ = conversation_of(self._gateway, chat, whole)
            prompt = await self._gateway.renderer.render_chat(
                conversation,
                num_bytes=whole.num_bytes,
                limit=self._gateway.max_model_len,
                traceparent=_traceparent(context),
            )
        except ApiError as error:
            raise as_request_error(error) from None
        return frontend_pb2.RenderResponse(
            token_ids=wire.pack_ids(prompt.token_ids),
            num_tokens=len(prompt.token_ids),
            starts_in_reasoning=prompt.starts_in_reasoning,
        )

    async def Abort(
        self, request: frontend_pb2.FrontendServiceAbortRequest, context: object
    ) -> frontend_pb2.FrontendServiceAbortResponse:
        """End a request by the id of its HTTP answer; its client gets the error `cancelled`."""
        found = await self._gateway.detokenizers.abort(request.request_id)
        return frontend_pb2.FrontendServiceAbortResponse(num_aborted=found)


def build_server(gateway: Gateway, address: str) -> rpc.Server:
    """The server, bound and not started."""
    server = rpc.build_server(address=address)
    frontend_pb2_grpc.add_FrontendServiceServicer_to_server(FrontendServicer(gateway), server)
    return server


def chat_body(request: frontend_pb2.RenderRequest) -> dict[str, Any]:
    """A render request as the body that an HTTP client would send."""
    body: dict[str, Any] = {"messages": [_message(message) for message in request.messages]}
    if request.tools:
        body["tools"] = [_tool(tool, i) for i, tool in enumerate(request.tools)]
    arguments = {
        name: getattr(request, name)
        for name in ("enable_thinking", "clear_thinking", "reasoning_effort")
        if request.HasField(name)
    }
    if arguments:
        body["chat_template_kwargs"] = arguments
    if request.HasField("add_generation_prompt"):
        body["add_generation_prompt"] = request.add_generation_prompt
    return body


def as_request_error(error: ApiError) -> RequestError:
    """A refusal of the HTTP side as one of the mesh."""
    reason = FailureReason.INVALID_ARGUMENT
    if error.code == "context_length_exceeded":
        reason = FailureReason.CONTEXT_LENGTH_EXCEEDED
    return RequestError(reason, error.message, field=error.param)


def _message(message: frontend_pb2.ChatMessage) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.HasField("reasoning"):
        body["reasoning"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments_json.decode("utf-8", "replace"),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    return body


def _tool(tool: frontend_pb2.ChatTool, position: int) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.parameters_json:
        try:
            function["parameters"] = msgspec.json.decode(tool.parameters_json)
        except (msgspec.DecodeError, RecursionError):
            field = f"tools[{position}].parameters_json"
            raise RequestError(
                FailureReason.INVALID_ARGUMENT, f"{field} is not valid JSON", field=field
            ) from None
    return {"type": "function", "function": function}


def _traceparent(context: Invocation) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str):
            return value
    return ""
