"""How do Cloudflare's clients find the models that are served?"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from control_plane.faces.services import services_of
from control_plane.generation import ModelDescription
from runtime.errors import InvalidRequest

_TASK = {
    "id": "c329a1f9-323d-4e91-b2aa-582dd4188d34",
    "name": "Text Generation",
    "description": "Family of generative text models, such as large language models (LLM), that can be adapted for a "
    "variety of natural language tasks.",
}
_MAX_PER_PAGE = 1000


async def search(request: Request) -> Response:
    """Answer a page of the models that fit; pages past the end are empty, which is what ends a client's paging."""
    page = _number(request, "page", default=1, highest=10**9)
    per_page = _number(request, "per_page", default=50, highest=_MAX_PER_PAGE)
    found = [model for model in services_of(request).catalog.list() if _fits(model, request)]
    shown = found[(page - 1) * per_page : page * per_page]
    return JSONResponse(
        {
            "result": [_model_json(model) for model in shown],
            "success": True,
            "errors": [],
            "messages": [],
            "result_info": {"page": page, "per_page": per_page, "count": len(shown), "total_count": len(found)},
        }
    )


def _fits(model: ModelDescription, request: Request) -> bool:
    wanted, task = request.query_params.get("search", ""), request.query_params.get("task", "")
    names = (model.model_id, *model.aliases)
    return any(wanted.lower() in name.lower() for name in names) and task.lower() in ("", _TASK["name"].lower())


def _number(request: Request, name: str, *, default: int, highest: int) -> int:
    text = request.query_params.get(name) or str(default)
    if not text.isdecimal() or not 1 <= int(text) <= highest:
        raise InvalidRequest(f"{name} is {text!r}, must be a number from 1 to {highest:,}", field=name)
    return int(text)


def _model_json(model: ModelDescription) -> dict[str, Any]:
    created = datetime.fromtimestamp(model.created_unix_seconds, UTC)
    properties = [("context_window", str(model.context_length)), ("architecture", model.architecture)]
    return {
        "id": str(uuid5(NAMESPACE_URL, model.model_id)),
        "source": 1,
        "name": model.model_id,
        "description": f"{model.architecture} with {model.num_parameters:,} parameters",
        "task": _TASK,
        "tags": [],
        "properties": [{"property_id": name, "value": value} for name, value in properties],
        "created_at": created.strftime("%Y-%m-%d %H:%M:%S.000"),
    }
