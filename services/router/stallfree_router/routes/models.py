"""GET /v1/models and GET /v1/models/{id}: what can be served now."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stallfree_router.routes.services import READ_METHODS, Services, services_of
from stallfree_shared.errors import ModelNotFoundError
from stallfree_shared.openai_api import Model, ModelList
from stallfree_shared.wire import ModelCard

router = APIRouter()


@router.api_route("/v1/models", methods=READ_METHODS)
async def list_models(request: Request) -> Response:
    services = services_of(request)
    served = services.served_models
    cards = [card for name, card in sorted(served.models().items()) if served.usable(name)]
    return _json(ModelList(data=tuple([_model(card, services) for card in cards])))


@router.api_route("/v1/models/{model:path}", methods=READ_METHODS)
async def get_model(request: Request, model: str) -> Response:
    """`model` may hold slashes."""
    services = services_of(request)
    card = services.served_models.models().get(model)
    if card is None or not services.served_models.usable(model):
        raise ModelNotFoundError("there is no such model; GET /v1/models lists those that are", param="model")
    return _json(_model(card, services))


def _model(card: ModelCard, services: Services) -> Model:
    return Model(id=card.model, created=services.created, max_model_len=card.max_model_len)


def _json(body: Model | ModelList) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")
