"""Looks for a route whose workers have room: at a few routes, each through other workers than those found full."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Protocol

from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.router import Route, Router
from tandem_runtime.errors import Overloaded

_MAX_ROUTES = 3
"""Routes that are looked at before a request waits."""
_MOST_DETOUR = 0.25
"""Another route than through the prefill worker that is full may take so much of that one's time for the prompt more.

That time has the wait for the full worker in it.
"""


class Lack(Enum):
    """The half of a route that has no room."""

    PREFILL = "prefill"
    DECODE = "decode"


class Narrow(Protocol):
    def __call__(self, route: Route, *, may_offer: bool) -> Route | Lack:
        """Return the route with those of its decode workers that are expected to take the request.

        `may_offer`: also workers that seem full, if they may be asked.
        """


def find_room(router: Router, request: RoutingRequest, avoid: Collection[str], narrow: Narrow) -> Route | None:
    """Return a route with room; None: there is none, or waiting is better.

    Raises what `Router.choose` raises of workers that are not in `avoid`.
    """
    avoid, full_prefill, may_offer = set(avoid), None, True
    for number in range(_MAX_ROUTES):
        try:
            route = router.choose(request, avoid)
        except Overloaded:
            if not number:
                raise
            return None
        if full_prefill is not None and not _is_worth(router, request, route, full_prefill):
            return None
        found = narrow(route, may_offer=may_offer)
        if isinstance(found, Route):
            return found
        if found is Lack.PREFILL and route.prefill is not None:
            full_prefill = full_prefill or route
            avoid.add(route.prefill.incarnation)
        else:
            may_offer = False
            avoid.update(worker.incarnation for worker in route.decodes)
    return None


def _is_worth(router: Router, request: RoutingRequest, route: Route, full: Route) -> bool:
    """Whether a route is taken rather than the wait for the prefill worker of another one, which is full."""
    if route.prefill is None and router.must_hand_over(request):
        return False
    if (route.prefill or route.decodes[0]).incarnation in router.health.out:
        return False
    (is_tight, cost_ms), (was_tight, full_ms) = route.cost, full.cost
    return is_tight <= was_tight and cost_ms - full_ms <= _MOST_DETOUR * full.predicted_ms.get("hand_over", 0.0)
