"""Arrays that enter and leave a stage: checked, coded (`crossing`), and moved between the host and
its device.

A value that is not finite is refused before anything is added. Values are also bounded by
`arrays.LARGEST_VALUE`: products of two such values still fit into fp32, so that a finite input
cannot make an infinite gradient where it enters.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from swarmnet.batch import IGNORED, Documents, check_documents
from swarmnet.errors import ProtocolViolation, RemoteError
from swarmnet.protocol.codecs import BOUNDARY_CODECS, NONE, BoundaryCodec
from swarmnet.training.arrays import LARGEST_VALUE, check_shape, to_tensor
from swarmnet.training.memory.device_copies import DeviceCopies
from swarmnet.training.models.base import LayerContext, ModelPlan, TensorSpec
from swarmnet.training.models.routing import Routing
from swarmnet.training.passes.crossing import Crossing, WithTokens
from swarmnet.training.passes.fp16 import Fp16Refusals
from swarmnet.wire import Array


class Boundary:
    """What one stage takes and gives, in dtype, shape and values.

    `receive_...` methods raise `ProtocolViolation` where an array does not fit.
    """

    def __init__(
        self,
        plan: ModelPlan,
        inputs: TensorSpec,
        outputs: TensorSpec,
        *,
        stage_index: int,
        microbatch: int,
        dtype: torch.dtype,
        copies: DeviceCopies,
        refusals: Fp16Refusals | None,
        document_mask: bool = False,
        codec: BoundaryCodec = BOUNDARY_CODECS[NONE],
    ) -> None:
        """
        Args:
            plan: for the targets.
            inputs: one sample of what enters the stage.
            outputs: one sample of what leaves it.
            stage_index: for texts of errors.
            microbatch: samples.
            dtype: of the passes.
            copies: between the host and the stage's device.
            refusals: in fp16; None in other precisions.
            document_mask: of the run: microbatches come with their documents.
            codec: of what comes from other stages and goes to them.
        """
        self._plan = plan
        self._document_mask = document_mask
        self._inputs = inputs
        self._outputs = outputs
        self._stage_index = stage_index
        self._microbatch = microbatch
        self._dtype = dtype
        self._copies = copies
        self._refusals = refusals
        below = codec if stage_index else BOUNDARY_CODECS[NONE]  # samples are not coded
        self._inputs_in = self._activations(below.activations, inputs)
        self._input_gradients_out = self._crossing(below.gradients, inputs)
        self._outputs_out = self._activations(codec.activations, outputs)
        self._output_gradients_in = self._crossing(codec.gradients, outputs)
        self._exact_in = self._activations(NONE, inputs)
        self._exact_out = self._activations(NONE, outputs)

    def check_inputs(self, inputs: Array) -> None:
        """Raises `ProtocolViolation` unless dtype and shape are those of a microbatch. Cheap."""
        check_shape("inputs", inputs, *self._input_form())

    def check_targets(self, targets: Array) -> None:
        """As `check_inputs`, for targets."""
        spec = self._plan.targets
        check_shape("targets", targets, spec.dtype, self._batch(spec))

    def check_gradient(self, grad_outputs: Array) -> None:
        """As `check_inputs`, for the gradient of the outputs."""
        self._output_gradients_in.check_form("gradient", grad_outputs, self._microbatch)

    def check_documents(self, inputs: Array, documents: Documents | None) -> None:
        """Raises `ProtocolViolation` unless documents are there where the run wants them, and fill
        the samples of `inputs`, whose shape was checked."""
        if documents is None and self._document_mask:
            raise ProtocolViolation("this run keeps documents apart, and none are named")
        self._check_lengths(inputs, documents)

    def _check_lengths(self, inputs: Array, documents: Documents | None) -> None:
        if documents is None:
            return
        if not self._document_mask:
            raise ProtocolViolation("this run does not keep documents apart, and some are named")
        check_documents(documents, *inputs.shape[:2])

    def receive_context(
        self,
        inputs: Array,
        documents: Documents | None = None,
        routing: Routing | None = None,
    ) -> LayerContext | None:
        """What layers get beside the activation, on the device: the position of each token in its
        document, int64 (samples, length), and the tokens, where the model asks for them. `inputs`:
        their shape was checked. `routing`: of `routing`. What is kept of it is small: each pass
        makes its mask."""
        tokens = self._tokens(inputs)
        positions = None
        if documents is not None:
            positions = self._copies.to_device(torch.stack([_positions(n) for n in documents]))
        if tokens is None and positions is None and routing is None:
            return None
        return LayerContext(positions, tokens=tokens, routing=routing)

    def routing(self, inputs: Array, targets: Array | None) -> Routing | None:
        """For a pass of training where the model has routers, else None. `inputs`: their shape
        was checked. No targets: as if all tokens had one."""
        if not self._plan.routes:
            return None
        if targets is None:
            return Routing(math.prod(inputs.shape[:2]))
        self.check_targets(targets)
        return Routing(self._plan.count(to_tensor(targets)))

    def _tokens(self, inputs: Array, *, exact: bool = False) -> Tensor | None:
        if self._plan.fixed is None:
            return None
        if self._inputs.dtype == "float32":
            crossing = self._exact_in if exact else self._inputs_in
            assert isinstance(crossing, WithTokens)
            inputs = crossing.tokens(inputs)
        return self._receive_integers("tokens", inputs, self._plan.inputs)

    def receive_inputs(self, inputs: Array) -> Tensor:
        """Inputs whose shape was checked, on the device; floats in the precision of the passes."""
        if self._inputs.dtype != "float32":
            return self._receive_integers("inputs", inputs, self._inputs)
        return self._inputs_in.receive("inputs", inputs, self._dtype)

    def receive_targets(self, targets: Array) -> Tensor:
        """Targets whose shape was checked, on the device."""
        spec = self._plan.targets
        if spec.dtype != "float32":
            takes_ignored = self._plan.takes_ignored
            return self._receive_integers("targets", targets, spec, takes_ignored=takes_ignored)
        return self._crossing(NONE, spec).receive("targets", targets)

    def receive_gradient(self, grad_outputs: Array) -> Tensor:
        """The gradient of the outputs, on the device, in the precision of the passes; in fp16 it
        stays fp32 until it is scaled."""
        self.check_gradient(grad_outputs)
        dtype = torch.float32 if self._refusals is not None else self._dtype
        return self._output_gradients_in.receive("gradient", grad_outputs, dtype)

    def receive_evaluation(
        self, inputs: Array, targets: Array | None, documents: Documents | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Inputs, and targets where there are some, of a batch that may be smaller than a
        microbatch, with sequences that may be shorter. Documents are checked: a sample may be one
        document."""
        self._check_sizes("inputs", inputs, self._inputs, *self._input_form())
        self._check_lengths(inputs, documents)
        x = self.receive_inputs(inputs)
        if targets is None:
            return x, None
        spec = self._plan.targets
        self._check_sizes("targets", targets, spec, spec.dtype, self._batch(spec))
        num_free = self._num_free(spec)
        if targets.shape[:num_free] != inputs.shape[:num_free]:
            raise ProtocolViolation("targets of another batch or length than the inputs")
        return x, self.receive_targets(targets)

    def receive_text(
        self, inputs: Array, most: int, *, exact: bool
    ) -> tuple[Tensor, Tensor | None]:
        """A few tokens of one text, or what the stage before made of them (coded, or `exact` in
        fp32), on the device: (1, n) or (1, n, width), n from 1 to `most`. Beside it the tokens,
        where the model asks for them."""
        is_plain = exact and self._inputs.dtype == "float32"
        dtype, largest = self._exact_in.form(self._microbatch) if is_plain else self._input_form()
        shape = inputs.shape
        fits = len(shape) == len(largest) and shape[0] == 1 and shape[2:] == largest[2:]
        if inputs.dtype != dtype or not fits or not 1 <= shape[1] <= most:
            raise ProtocolViolation(
                f"inputs: {str(inputs.dtype)[:16]} of shape {str(shape)[:64]}; at most "
                f"{dtype} of shape {(1, most, *largest[2:])}"
            )
        tokens = self._tokens(inputs, exact=exact)
        if is_plain:
            return self._exact_in.receive("inputs", inputs, self._dtype), tokens
        return self.receive_inputs(inputs), tokens

    def is_whole_batch(self, inputs: Tensor) -> bool:
        """Whether inputs have the shape of a microbatch."""
        return tuple(inputs.shape) == self._batch(self._inputs)

    def send_outputs(
        self, outputs: Tensor, context: LayerContext | None = None
    ) -> Callable[[], Array]:
        """The activation for the next stage, coded, as `Crossing.send`. `context`: of its inputs.

        Raises, at once or when it is finished:
            ProtocolViolation: a value is not finite; the inputs are to blame.
            RemoteError: fp16 cannot hold the values, or the model's shapes are wrong.
        """
        expected = self._batch(self._outputs)
        if outputs.dtype != self._dtype or tuple(outputs.shape) != expected:
            raise RemoteError(
                f"stage {self._stage_index} gave {outputs.dtype} of shape {tuple(outputs.shape)}, "
                f"not {self._dtype} of shape {expected}: correct the model's output_shape"
            )
        sending, refusals = _send(self._outputs_out, outputs, context), self._refusals

        def finish() -> Array:
            try:
                return sending()
            except ProtocolViolation:
                if refusals is None:
                    raise
                raise refusals.refuse("an activation of") from None

        return finish

    def send_evaluation(
        self, outputs: Tensor, context: LayerContext | None = None
    ) -> Callable[[], Array]:
        """As `send_outputs`, of inputs that `receive_evaluation` gave. Raises `ProtocolViolation`
        where a value is not finite."""
        return _send(self._outputs_out, outputs, context)

    def send_text(
        self, outputs: Tensor, context: LayerContext, *, exact: bool
    ) -> Callable[[], Array]:
        """As `send_evaluation`, of inputs that `receive_text` gave; `exact`: in fp32."""
        return _send(self._exact_out if exact else self._outputs_out, outputs, context)

    def send_input_gradient(self, grad: Tensor) -> Callable[[], Array]:
        """The gradient for the stage before, coded, as `Crossing.send`.

        Raises, when it is finished:
            RemoteError: a value is not finite; the parameters of this stage are to blame, not who
                sent.
        """
        sending = self._input_gradients_out.send("gradient", grad)

        def finish() -> Array:
            try:
                return sending()
            except ProtocolViolation:
                where = f"the gradient at stage {self._stage_index}"
                raise RemoteError(f"{where} is not finite") from None

        return finish

    def decoded_outputs(self, array: Array) -> Tensor:
        """An activation that a replica of this stage gave, on the host. Raises
        `ProtocolViolation`."""
        self._outputs_out.check_form("activation", array, self._microbatch)
        return self._outputs_out.read("activation", array)

    def tokens_beside(self, array: Array) -> bytes:
        """What goes with such an activation; empty where nothing does."""
        crossing = self._outputs_out
        return bytes(crossing.tokens(array).data) if isinstance(crossing, WithTokens) else b""

    def decoded_input_gradient(self, array: Array) -> Tensor:
        """As `decoded_outputs`, of the gradient for the stage before."""
        self._input_gradients_out.check_form("gradient", array, self._microbatch)
        return self._input_gradients_out.read("gradient", array)

    def _batch(self, spec: TensorSpec) -> tuple[int, ...]:
        return (self._microbatch, *spec.shape)

    def _num_free(self, spec: TensorSpec) -> int:
        """Dimensions of a batch of which an evaluation may have less: samples and, in sequences,
        tokens."""
        return 2 if self._plan.is_sequence and spec.shape else 1

    def _crossing(self, codec: str, spec: TensorSpec) -> Crossing:
        return Crossing(codec, spec.shape, self._num_free(spec), self._copies, self._dtype)

    def _activations(self, codec: str, spec: TensorSpec) -> Crossing | WithTokens:
        """Of what goes up. Samples have no tokens beside them: they are tokens."""
        plain = self._crossing(codec, spec)
        if self._plan.fixed is None or spec.dtype != "float32":
            return plain
        return WithTokens(plain)

    def _input_form(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of the inputs of a microbatch."""
        if self._inputs.dtype != "float32":
            return self._inputs.dtype, self._batch(self._inputs)
        return self._inputs_in.form(self._microbatch)

    def _receive_integers(
        self, what: str, array: Array, spec: TensorSpec, *, takes_ignored: bool = False
    ) -> Tensor:
        """The array as a tensor on the device, its values checked."""
        tensor = to_tensor(array)
        _check_range(what, tensor, spec.num_values, takes_ignored=takes_ignored)
        return self._copies.to_device(tensor)

    def _check_sizes(
        self, what: str, array: Array, spec: TensorSpec, dtype: str, largest: tuple[int, ...]
    ) -> None:
        """As `check_inputs`, for evaluation: at most a microbatch of sequences of full length.
        `dtype` and `largest`: the form of a microbatch of `spec`."""
        shape = array.shape
        num_free = self._num_free(spec)
        fits = (
            array.dtype == dtype
            and len(shape) == len(largest)
            and all(1 <= n <= most for n, most in zip(shape[:num_free], largest[:num_free]))
            and shape[num_free:] == largest[num_free:]
        )
        if not fits:
            raise ProtocolViolation(
                f"{what}: {str(array.dtype)[:16]} of shape {str(shape)[:64]}; "
                f"at most {dtype} of shape {largest}"
            )


def _send(
    crossing: Crossing | WithTokens, outputs: Tensor, context: LayerContext | None
) -> Callable[[], Array]:
    if isinstance(crossing, Crossing):
        return crossing.send("activation", outputs)
    assert context is not None
    assert context.tokens is not None
    return crossing.send("activation", outputs, context.tokens)


def finite_loss(loss: Tensor) -> float:
    """The loss as a number.

    Raises:
        ProtocolViolation: it is not finite, or beyond `arrays.LARGEST_VALUE`.
    """
    value = float(loss.detach())
    if not abs(value) <= LARGEST_VALUE:
        raise ProtocolViolation("the loss is not finite")
    return value


def _positions(lengths: tuple[int, ...]) -> Tensor:
    counts = torch.tensor(lengths)
    starts = counts.cumsum(0) - counts
    return torch.arange(sum(lengths)) - starts.repeat_interleave(counts)


def _check_range(what: str, tensor: Tensor, num_values: int, *, takes_ignored: bool) -> None:
    low, high = torch.aminmax(tensor)
    if takes_ignored and low.item() == IGNORED:
        tensor = tensor[tensor != IGNORED]
        if not tensor.numel():
            return
        low, high = torch.aminmax(tensor)
    if low.item() < 0 or high.item() >= num_values:
        raise ProtocolViolation(f"{what}: a value outside [0, {num_values})")
