"""GET /health, /ping, /version and /metrics: for operators and routers, no key asked."""

from fastapi import APIRouter, Response

from services.frontend.documentation import error_docs
from services.frontend.errors import ApiError
from services.frontend.gateway import Gateway
from services.frontend.schemas.answers import Health, Version
from shared.admin import software_version
from shared.metrics import CONTENT_TYPE


def router(gateway: Gateway) -> APIRouter:
    """The routes of operations."""
    routes = APIRouter(tags=["operations"])

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", response_model=Health, responses=error_docs(503))
    @routes.get("/ping", response_model=Health, responses=error_docs(503))
    async def health() -> Health:
        """200 when a request would be served: every service of the chain is there."""
        reason = gateway.not_ready_reason
        if reason:
            raise ApiError(
                503,
                f"The server is not ready: {reason}.",
                code="service_unavailable",
                headers={"retry-after": "1"},
            )
        return Health(status="ready")

    @routes.get("/version", response_model=Version)
    async def version() -> Version:
        """Version of this software."""
        return Version(version=software_version())

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus' text form."""
        return Response(gateway.metrics.render(), headers={"content-type": CONTENT_TYPE})

    return routes
