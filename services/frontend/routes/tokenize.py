"""POST /tokenize and /detokenize."""

from fastapi import APIRouter, Request, Response

from services.frontend.bodies import Body
from services.frontend.chat_plan import shown_ids, unknown_in_tools
from services.frontend.documentation import body_docs, error_docs
from services.frontend.errors import invalid
from services.frontend.fields import sort_extra, unknown_header, unknown_in_parts
from services.frontend.gateway import Gateway
from services.frontend.not_served import TOKENIZE_NOT_SERVED
from services.frontend.render import NO_LIMIT
from services.frontend.schemas.answers import DetokenizeAnswer, TokenizeAnswer
from services.frontend.schemas.chat import ChatRequest
from services.frontend.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from services.frontend.serving import admit
from services.frontend.validation import parse
from services.frontend.visit import visit_of


def router(gateway: Gateway) -> APIRouter:
    """The routes of the tokenizer."""
    routes = APIRouter(tags=["tokenizer"])

    @routes.post(
        "/tokenize",
        response_model=TokenizeAnswer,
        response_model_exclude_none=True,
        responses=error_docs(400, 404, 408, 413, 429, 503),
        openapi_extra=body_docs(TokenizeRequest),
    )
    async def tokenize(request: Request, response: Response) -> TokenizeAnswer:
        """Ids of a text, or of a conversation as it would be shown to the model."""
        body = await _read(gateway, request)
        asked = parse(TokenizeRequest, body.value)
        gateway.check_model(asked.model)
        unknown = sort_extra(asked, TOKENIZE_NOT_SERVED)
        ids, inside = await _ids(gateway, asked, body)
        response.headers.update(unknown_header(unknown + inside))
        strings = None
        if asked.return_token_strs:
            strings = [gateway.dialect.token_string(token_id) for token_id in ids]
        return TokenizeAnswer(
            count=len(ids),
            max_model_len=gateway.max_model_len,
            tokens=ids,
            token_strs=strings,
        )

    @routes.post(
        "/detokenize",
        response_model=DetokenizeAnswer,
        responses=error_docs(400, 404, 408, 413, 429, 503),
        openapi_extra=body_docs(DetokenizeRequest),
    )
    async def detokenize(request: Request, response: Response) -> DetokenizeAnswer:
        """The text of ids; special tokens are shown, ids outside the vocabulary refused."""
        body = await _read(gateway, request)
        asked = parse(DetokenizeRequest, body.value)
        gateway.check_model(asked.model)
        gateway.renderer.check_ids(asked.tokens, "tokens")
        response.headers.update(unknown_header(sort_extra(asked, {})))
        return DetokenizeAnswer(prompt=await gateway.renderer.decode(asked.tokens))

    return routes


async def _read(gateway: Gateway, request: Request) -> Body:
    _, body = await admit(gateway, request, visit_of(request.scope))
    return body


async def _ids(gateway: Gateway, asked: TokenizeRequest, body: Body) -> tuple[list[int], list[str]]:
    """The ids, and the paths of unknown fields of a conversation."""
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("Give exactly one of 'prompt' and 'messages'.", "prompt")
    if asked.prompt is not None:
        ids = await gateway.renderer.encode(
            asked.prompt, allow_control=True, limit=NO_LIMIT, param="prompt"
        )
        return ids, []
    chat = parse(ChatRequest, {name: body.value[name] for name in _CHAT_FIELDS & body.value.keys()})
    ids, unknown = await shown_ids(gateway, chat, body)
    unknown += unknown_in_parts(chat, except_for=("messages", "tools")) + unknown_in_tools(chat)
    return ids, unknown


_CHAT_FIELDS = frozenset(
    {
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "messages",
        "reasoning_effort",
        "thinking",
        "tools",
    }
)
