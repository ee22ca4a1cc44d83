"""POST /reset_prefix_cache, where it is switched on: for tests, and trainers with new weights."""

from fastapi import APIRouter

from services.frontend.documentation import error_docs
from services.frontend.gateway import Gateway
from services.frontend.schemas.answers import CacheReset


def router(gateway: Gateway) -> APIRouter:
    """The routes of development; none where they are off."""
    routes = APIRouter(tags=["development"])
    if not gateway.settings.enable_dev_routes:
        return routes

    @routes.post("/reset_prefix_cache", response_model=CacheReset, responses=error_docs(401, 503))
    async def reset_prefix_cache() -> CacheReset:
        """Share nothing that was computed so far; requests that run go on."""
        return CacheReset(num_blocks=await gateway.detokenizers.reset_cache())

    return routes
