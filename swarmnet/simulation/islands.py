"""Parts of a swarm that do not see each other although nothing keeps them apart. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field


def parts(sees: Mapping[str, Set[str]]) -> list[list[str]]:
    """Peers that are connected by somebody's seeing somebody, the largest part first. `sees`: whom
    each of them takes for alive."""
    of = {name: name for name in sees}

    def root(name: str) -> str:
        while of[name] != name:
            of[name] = of[of[name]]
            name = of[name]
        return name

    for name in sorted(sees):
        for other in sorted(sees[name]):
            if other in of:
                of[root(name)] = root(other)
    found: dict[str, list[str]] = {}
    for name in sorted(sees):
        found.setdefault(root(name), []).append(name)
    return sorted(found.values(), key=lambda part: (-len(part), part))


@dataclass
class Islands:
    """How long somebody has been outside the largest part."""

    longest_s: float = 0.0
    """Of any island so far."""
    _since: dict[str, float] = field(default_factory=dict)

    def look(self, sees: Mapping[str, Set[str]], now: float) -> float:
        """`sees`: of those who run and whom nothing keeps apart from the others. Returns for how
        long the oldest island has been there, seconds."""
        outside = [name for part in parts(sees)[1:] for name in part]
        self._since = {name: self._since.get(name, now) for name in outside}
        oldest_s = now - min(self._since.values(), default=now)
        self.longest_s = max(self.longest_s, oldest_s)
        return oldest_s
