"""Plain PyTorch loops for the other sync modes: the tests compare the swarm's numbers with theirs.

- `DelayedReference` (mode `delayed`): one process whose updates come one round late.
- `LocalReference` (mode `local`): every replica of the swarm is a model in one process. Each has
  its own optimizer; the outer step is `torch.optim.SGD` with Nesterov momentum. The test
  says which replica saw which microbatch.
- `GossipReference` (mode `gossip`): the same, with pairs in place of groups.

Like `reference.ReferenceTrainer`, they use nothing that a stage or a shard is made of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnet.runtime.compose import run_settings
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import to_tensor
from swarmnet.training.codecs.shards import round_trip
from swarmnet.training.data import open_data
from swarmnet.training.models.base import build_layer
from swarmnet.training.models.registry import model_plan, split_stages
from tests.oracles.optimizers import Optimizers
from tests.oracles.reference import ReferenceTrainer


class DelayedReference:
    """One process whose updates come one round late, for mode `delayed`.

    After the warm-up, the gradient of round r is applied only after the gradient of round r + 1 was
    taken. Round r + 1 therefore lacks one update: its gradient is taken at parameters to which a
    prediction of that update was added.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._warmup_rounds = spec.sync_warmup_rounds
        self._beta1 = spec.optimizer.beta1
        self.trainer = ReferenceTrainer(spec)
        self._waiting: tuple[int, int, dict[str, Tensor]] | None = None
        self._ahead: dict[str, Tensor] = {}
        """The prediction of the update that the next round lacks, by name of the parameter."""

    def step(self, round_index: int, slots: Sequence[int]) -> float:
        """One round; returns its mean loss, nats per token."""
        with self._predicted():
            loss_sum, num_tokens = self.trainer.accumulate(round_index, slots)
        gradients = self.trainer.swap_gradients({})
        if self._waiting is not None:
            late_round = self._waiting[0]
            self.finish()
            self._ahead = self.foretold(late_round)
        self._waiting = (round_index, num_tokens, gradients)
        if round_index < self._warmup_rounds:
            self.finish()
        return loss_sum / num_tokens

    def foretold(self, late_round: int) -> dict[str, Tensor]:
        """The prediction of the update that comes after that of a round, which was made last: of
        Muon's the last step once more."""
        of_adam = self.trainer.adam_step(
            late_round, 0.45 * self._beta1, 1.2 * self._beta1 * (1 - self._beta1)
        )
        return of_adam | self.trainer.last_muon_step()

    def held_out_loss(self) -> float:
        """With the parameters of the coming round, nats per token."""
        with self._predicted():
            return self.trainer.held_out_loss()

    @contextlib.contextmanager
    def _predicted(self) -> Iterator[None]:
        """The parameters of the coming round: the prediction is added."""
        own = {n: p.clone() for n, p in self.trainer.state_dict().items()}
        self.trainer.load_state_dict({n: p + self._ahead.get(n, 0.0) for n, p in own.items()})
        yield
        self.trainer.load_state_dict(own)

    def lose(self) -> None:
        """The gradient whose update is to come is lost."""
        self._waiting = None

    def finish(self) -> None:
        """Makes the last update, which no later round makes."""
        if self._waiting is not None:
            round_index, num_tokens, gradients = self._waiting
            self.trainer.swap_gradients(gradients)
            self.trainer.update(round_index, num_tokens)
            self._waiting, self._ahead = None, {}


class ReferenceReplica:
    """One replica of one stage: its layers, and an optimizer of its own."""

    def __init__(self, spec: RunSpec, stage_index: int) -> None:
        plan = model_plan(spec)
        layers = split_stages(plan, spec.pipeline.num_stages)[stage_index]
        self.layers = {layer.name: build_layer(plan, layer, spec.seed) for layer in layers}
        self.model = nn.Sequential(*self.layers.values())
        self._clip = spec.optimizer.grad_clip_norm
        self.spec = spec
        self.num_steps = 0
        self.inner = Optimizers(self._named_parameters(), spec.optimizer)
        self.tokens_of_round = 0
        self.tokens = 0
        """Tokens since the last outer step."""

    def step(self, round_index: int) -> None:
        """One optimizer step on the gradient that this replica has summed up in the round."""
        if self.tokens_of_round:
            for p in self.model.parameters():
                assert p.grad is not None
                p.grad /= self.tokens_of_round
            if self._clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
            self.inner.step(round_index)
            self.num_steps += 1
        self.tokens += self.tokens_of_round
        self.tokens_of_round = 0
        self.inner.zero_grad()

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return {name: p.detach() for name, p in self._named_parameters().items()}

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{layer}.{name}": p
            for layer, module in self.layers.items()
            for name, p in module.named_parameters()
        }


class Replicas:
    """The replicas of a swarm, each with parameters of its own."""

    def __init__(self, spec: RunSpec, replicas: Mapping[str, int]) -> None:
        """`replicas`: the stage of each, by name."""
        self._settings = run_settings(spec)
        self._plan = model_plan(spec)
        self._data = open_data(spec)
        self.by_name = {n: ReferenceReplica(spec, s) for n, s in sorted(replicas.items())}
        self.stages = {
            s: {n: self.by_name[n] for n in sorted(replicas) if replicas[n] == s}
            for s in sorted(set(replicas.values()))
        }

    def step(self, round_index: int, paths: Mapping[int, Sequence[str]]) -> float:
        """One optimizer step of each replica. `paths`: for each microbatch, the names of the
        replicas that it went through. Returns the mean loss, nats per token."""
        loss_sum, num_tokens = 0.0, 0
        for slot, path in sorted(paths.items()):
            indices = self._settings.samples_of(round_index, slot, self._data.num_samples)
            inputs, targets = (to_tensor(a) for a in self._data.microbatch(indices).arrays)
            x = inputs
            for name in path:
                x = self.by_name[name].model(x)
            loss = self._plan.loss(x, targets)
            loss.backward()
            tokens = self._plan.count(targets)
            for name in path:
                self.by_name[name].tokens_of_round += tokens
            loss_sum += loss.item()
            num_tokens += tokens
        for replica in self.by_name.values():
            replica.step(round_index)
        return loss_sum / num_tokens


class LocalReference:
    """A swarm in mode `local`. A shard is a piece of a stage's parameters in one vector."""

    def __init__(self, spec: RunSpec, replicas: Mapping[str, int]) -> None:
        """`replicas`: the stage of each, by name."""
        self._spec = spec
        self.replicas = Replicas(spec, replicas)
        size = spec.sync.shard_parameters
        self._common = {
            s: [
                nn.Parameter(piece.clone()) for piece in _flat(next(iter(own.values()))).split(size)
            ]
            for s, own in self.replicas.stages.items()
        }
        self._outer = {
            s: [
                torch.optim.SGD(
                    [shard],
                    lr=spec.sync.outer_learning_rate,
                    momentum=spec.sync.outer_momentum,
                    nesterov=spec.sync.outer_momentum > 0,
                )
                for shard in shards
            ]
            for s, shards in self._common.items()
        }
        self._tokens = {
            n: [0] * len(self._common[s]) for s, own in self.replicas.stages.items() for n in own
        }
        """By replica and shard: tokens since the shard's last outer step."""
        self._late: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        """By stage and shard: tokens and changes for the next outer step."""

    def step(
        self,
        round_index: int,
        paths: Mapping[int, Sequence[str]],
        late: Collection[tuple[str, int]] = (),
    ) -> float:
        """One round; `paths` as in `Replicas.step`. `late`: replicas and shards whose change counts
        in the next outer step. Returns the mean loss, nats per token."""
        loss = self.replicas.step(round_index, paths)
        for name, replica in self.replicas.by_name.items():
            self._tokens[name] = [t + replica.tokens for t in self._tokens[name]]
            replica.tokens = 0
        is_plain = _is_plain(self._spec, round_index)
        for stage, shards in self._common.items():
            due = [j for j in range(len(shards)) if is_plain or self._is_turn(j, round_index)]
            if due:
                self._exchange(stage, due, is_plain, late)
        return loss

    def _is_turn(self, shard: int, round_index: int) -> bool:
        """Whether the shard's fragment is exchanged in this round. The turns of the fragments are
        evenly spaced; the first fragment comes last."""
        sync = self._spec.sync
        fragment = shard % sync.fragments
        return (round_index + 1 + fragment * sync.local_steps // sync.fragments) % (
            sync.local_steps
        ) == 0

    def _exchange(
        self, stage: int, due: Sequence[int], is_plain: bool, late: Collection[tuple[str, int]]
    ) -> None:
        replicas, shards = self.replicas.stages[stage], self._common[stage]
        flats = {n: _flat(r) for n, r in replicas.items()}
        pieces = {n: flat.split(self._spec.sync.shard_parameters) for n, flat in flats.items()}
        for j in due:
            shard, parts = shards[j], self._late.pop((stage, j), [])
            for n in replicas:
                part = self._tokens[n][j], shard.detach() - pieces[n][j].detach()
                where = self._late.setdefault((stage, j), []) if (n, j) in late else parts
                where.append(part)
            total = sum(tokens for tokens, _ in parts)
            if not total:
                continue
            with torch.no_grad():
                change = sum(part * (tokens / total) for tokens, part in parts)
                shard.grad = torch.as_tensor(change)
                if is_plain:
                    shard.sub_(shard.grad)
                else:
                    self._outer[stage][j].step()
                for n in replicas:
                    pieces[n][j].copy_(shard)
                    self._tokens[n][j] = 0
        for n, replica in replicas.items():
            nn.utils.vector_to_parameters(flats[n], replica.model.parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """The common parameters by name."""
        state: dict[str, Tensor] = {}
        for stage, shards in self._common.items():
            names = next(iter(self.replicas.stages[stage].values())).state_dict()
            flat = torch.cat([shard.detach() for shard in shards])
            sizes = [p.numel() for p in names.values()]
            for (name, p), values in zip(names.items(), flat.split(sizes), strict=True):
                state[name] = values.view_as(p)
        return state


class SparseLocalReference(LocalReference):
    """With `[sync] topk_density`: of each chunk of 4,096 numbers of a shard `kept` are sent, in the
    changes of replicas and in what their outer step changes. Where a step is plain, the tiles of
    the codecs stand in their place, which are tested by themselves.

    What is sent has four values a chunk, so that many numbers of a step are alike but for the last
    bit, and that says which are sent next. So the operations are those of `docs/protocol.md`, in
    their order."""

    def __init__(self, spec: RunSpec, replicas: Mapping[str, int], kept: int) -> None:
        super().__init__(spec, replicas)
        self._kept = kept
        self._ahead = {s: [torch.zeros_like(p) for p in own] for s, own in self._common.items()}
        """By how much what replicas have is ahead of what the outer steps have led to."""
        self._momenta = {s: [torch.zeros_like(p) for p in own] for s, own in self._common.items()}
        self._errors: dict[tuple[str, int], tuple[bool, Tensor]] = {}
        """By replica and shard: whether of a plain step, and what it has lost of a change."""

    def _exchange(
        self, stage: int, due: Sequence[int], is_plain: bool, late: Collection[tuple[str, int]]
    ) -> None:
        assert not late
        replicas = self.replicas.stages[stage]
        flats = {n: _flat(r) for n, r in replicas.items()}
        pieces = {n: flat.split(self._spec.sync.shard_parameters) for n, flat in flats.items()}
        for j in due:
            present, ahead = self._common[stage][j].detach(), self._ahead[stage][j]
            total, summed = 0, torch.zeros_like(present)
            for n in replicas:
                tokens, self._tokens[n][j] = self._tokens[n][j], 0
                change = tokens * (present - pieces[n][j].detach())
                summed += self._contributed(n, j, change, is_plain) if tokens else 0.0
                total += tokens
            if not total:
                continue
            gradient = summed * (1.0 / total)
            own = self._stepped(self._momenta[stage][j], present - ahead, gradient, is_plain)
            change = own - present
            present += tiled("int4", change) if is_plain else few(change, self._kept)
            ahead.copy_((1.0 if is_plain else 0.5) * (present - own))
            with torch.no_grad():
                for n in replicas:
                    pieces[n][j].copy_(present)
        for n, replica in replicas.items():
            nn.utils.vector_to_parameters(flats[n], replica.model.parameters())

    def _stepped(self, momentum: Tensor, own: Tensor, gradient: Tensor, is_plain: bool) -> Tensor:
        sync = self._spec.sync
        if is_plain:
            return own - gradient
        momentum.mul_(sync.outer_momentum).add_(gradient)
        step = gradient.add(momentum, alpha=sync.outer_momentum)
        return own - sync.outer_learning_rate * step

    def _contributed(self, name: str, shard: int, change: Tensor, is_plain: bool) -> Tensor:
        known = self._errors.get((name, shard))
        if known is not None and known[0] == is_plain:
            change = change + (1.0 if is_plain else 0.8) * known[1]
        sent = tiled("int6", change) if is_plain else few(change, self._kept)
        self._errors[name, shard] = is_plain, (change - sent).bfloat16().float()
        return sent


def few(values: Tensor, kept: int) -> Tensor:
    """The largest numbers of each chunk, as the nearest of two levels, with their signs."""
    found = torch.zeros_like(values)
    for chunk, out in zip(values.split(4096), found.split(4096), strict=True):
        whole = functional.pad(chunk, (0, 4096 - len(chunk)))
        places = whole.abs().topk(kept, sorted=False).indices  # which of equal ones, it alone knows
        places = places.sort().values
        sizes = whole[places].abs()
        is_large = sizes > sizes.mean()
        for which in (is_large, ~is_large):
            level = sizes[which].mean().bfloat16().float() if which.any() else torch.zeros(())
            sizes[which] = level
        whole = torch.zeros(4096).index_copy(0, places, sizes * whole[places].sign())
        out.copy_(whole[: len(chunk)])
    return found


def tiled(name: str, values: Tensor) -> Tensor:
    """Decoded again from a codec that codes tiles."""
    return round_trip(name, values.contiguous())[1]


class GossipReference:
    """A swarm in mode `gossip`. Partners average the moments with the bias removed."""

    def __init__(self, spec: RunSpec, replicas: Mapping[str, int]) -> None:
        """`replicas`: the stage of each, by name."""
        self._spec = spec
        self.replicas = Replicas(spec, replicas)
        self._slow = {n: _copies(r) for n, r in self.replicas.by_name.items()}
        self._momentum = {n: [torch.zeros_like(p) for p in slow] for n, slow in self._slow.items()}
        self.spread: dict[str, float] = {}
        """By replica: distance from its partner at their last meeting, relative to its norm."""

    def step(
        self,
        round_index: int,
        paths: Mapping[int, Sequence[str]],
        partners: Mapping[str, str | None],
    ) -> float:
        """One round; `partners`: by replica, its partner if this is a round of meetings (None: it
        is alone). Returns the mean loss, nats per token."""
        loss = self.replicas.step(round_index, paths)
        if _is_exchanged(self._spec, round_index):
            self._meet(partners, _is_plain(self._spec, round_index))
        return loss

    def _meet(self, partners: Mapping[str, str | None], is_plain: bool) -> None:
        sync, replicas = self._spec.sync, self.replicas.by_name
        rate, decay = sync.outer_learning_rate, sync.gossip_momentum
        fast = {n: _copies(r) for n, r in replicas.items()}
        moments = {n: _unbiased(r) for n, r in replicas.items()}
        slow = {n: [p.clone() for p in values] for n, values in self._slow.items()}
        for name, other in partners.items():
            if other is not None:
                flat, their_flat = _flat(replicas[name]), _flat(replicas[other])
                self.spread[name] = float((flat - their_flat).norm() / flat.norm())
        for name, replica in replicas.items():
            pair = [name] if partners[name] is None else [name, str(partners[name])]
            with torch.no_grad():
                for i, p in enumerate(replica.model.parameters()):
                    change = sum(fast[n][i] - slow[n][i] for n in pair) / len(pair)
                    middle = sum(slow[n][i] for n in pair) / len(pair)
                    step = change + middle - slow[name][i]
                    if not is_plain:
                        step = self._momentum[name][i].mul_(decay).add_(rate * step)
                    self._slow[name][i] += step
                    p.copy_(self._slow[name][i])
                    _set_moments(replica, p, [moments[n][i] for n in pair])

    def state_dict(self, name: str) -> dict[str, Tensor]:
        """The parameters of one replica by name."""
        return self.replicas.by_name[name].state_dict()


def _is_exchanged(spec: RunSpec, round_index: int) -> bool:
    return _is_plain(spec, round_index) or (round_index + 1) % spec.sync.local_steps == 0


def _is_plain(spec: RunSpec, round_index: int) -> bool:
    """Whether the outer step of this round is the plain mean."""
    is_last = round_index == spec.optimizer.rounds - 1
    return round_index < spec.sync_warmup_rounds or is_last


def _flat(replica: ReferenceReplica) -> Tensor:
    """A copy of all of the replica's parameters in one vector."""
    return nn.utils.parameters_to_vector(replica.model.parameters()).detach()


def _copies(replica: ReferenceReplica) -> list[Tensor]:
    return [p.detach().clone() for p in replica.model.parameters()]


MOMENTS = {"exp_avg": "beta1", "exp_avg_sq": "beta2", "momentum": "momentum"}
"""By name in an optimizer's state, the key of `[optimizer]` that says how it fades."""


def _moments(replica: ReferenceReplica, p: nn.Parameter) -> dict[str, float]:
    """What there is of a parameter, and how much of its values the number of steps takes away."""
    state, spec = replica.inner.state(p), replica.spec
    t = replica.num_steps
    return {
        key: 1 - getattr(spec.optimizer, beta) ** t for key, beta in MOMENTS.items() if key in state
    }


def _unbiased(replica: ReferenceReplica) -> list[dict[str, Tensor]]:
    return [
        {key: replica.inner.state(p)[key] / bias for key, bias in _moments(replica, p).items()}
        for p in replica.model.parameters()
    ]


def _set_moments(
    replica: ReferenceReplica, p: nn.Parameter, of_pair: list[dict[str, Tensor]]
) -> None:
    for key, bias in _moments(replica, p).items():
        values = [moments[key] for moments in of_pair]
        replica.inner.state(p)[key].copy_(sum(values) / len(values) * bias)
