"""Parts of a swarm that do not see each other although no cut separates them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field


def parts(sees: Mapping[str, Set[str]]) -> list[list[str]]:
    """The connected parts of the graph `sees` (for each peer, the peers that are live in its view),
    the largest part first."""
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
    """Measures for how long peers have been outside the largest part."""

    longest_s: float = 0.0
    """The longest duration of any island so far, seconds."""
    _since: dict[str, float] = field(default_factory=dict)

    def look(self, sees: Mapping[str, Set[str]], now: float) -> float:
        """`sees`: views of the running peers that no cut separates from the others. Returns the age
        of the oldest island, seconds."""
        outside = [name for part in parts(sees)[1:] for name in part]
        self._since = {name: self._since.get(name, now) for name in outside}
        oldest_s = now - min(self._since.values(), default=now)
        self.longest_s = max(self.longest_s, oldest_s)
        return oldest_s
