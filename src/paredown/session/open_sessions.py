"""Records open sessions: at most one for a model, the modules inside it and the models around it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from paredown.errors import ApplyError

# Both references are weak, as is a session's reference to its model; the hooks on the model keep the session alive.
_SESSIONS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def check_has_none(model: nn.Module) -> None:
    """Raise ApplyError if the model, a module inside it, or a model that contains it has an open session."""
    for other, session in [(other, ref()) for other, ref in list(_SESSIONS.items())]:
        owner = "this model" if other is model else "a part of this model" if _is_part(other, model) else None
        owner = owner or ("a model that this is a part of" if _is_part(model, other) else None)
        if owner:
            raise ApplyError(f"{owner} has a session already: call its close() before applying another plan. It is {session!r}.")


def register(model: nn.Module, session: Any) -> None:
    """Record `session`, a `Session` or a `SimulatedSession`, as the open session of a model."""
    _SESSIONS[model] = weakref.ref(session)


def forget(model: nn.Module, session: Any) -> None:
    """Remove the record of a model's session, so that another plan can be applied."""
    current = _SESSIONS.get(model)
    if current is not None and current() is session:
        del _SESSIONS[model]


def any_session_of(model: nn.Module) -> Any:
    """Return the open session of a model, a `Session` or a `SimulatedSession`; None if it has none."""
    session = _SESSIONS.get(model)
    return session() if session is not None else None


def _is_part(part: nn.Module, whole: nn.Module) -> bool:
    return any(module is part for module in whole.modules())
