"""The training loop of backbone, adapter, unlearning and classifier.

An `Algorithm` is a pair of pure functions. `fit` takes its steps, checks the results, writes
checkpoints and resumes from them.
"""

import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from raslik_jax.base.axes import Tree
from raslik_jax.base.progress import progress
from raslik_jax.parallel import meshes, processes
from raslik_jax.train import resuming

# objective(params, frozen, part) -> (value, aux); both are sums over the rows of the part.
Objective = Callable[[Tree, Tree, Any], tuple[Array, Any]]
# Looking at each loss at once would stall the device: numbers are read this many steps behind it,
# and not before a second has passed or so many steps are done.
_IN_FLIGHT, _LOOK_SECONDS, _LOOK_EVERY = 2, 1.0, 32


class State(NamedTuple):
    """The values that a step carries on: parameters, optimizer state and number of steps taken."""

    params: Tree
    opt_state: optax.OptState
    step: Int[Array, ""]


class Loss(NamedTuple):
    """The report of a step of supervised training: the loss before its update, nats a token."""

    loss: Float[Array, ""]


class Algorithm(NamedTuple):
    """A pair of pure functions, init(params) and step(state, frozen, batch).

    `frozen` is never changed. It is an argument, so that no jit stores it as constants. `fields`
    are the names of the numbers in info. These are reported and never read back.
    """

    init: Callable[[Tree], State]
    step: Callable[[State, Tree, Any], tuple[State, Any]]
    fields: tuple[str, ...]


class Diverged(ValueError):
    """A model that is trained has numbers or weights that are not finite."""


class Progress(NamedTuple):
    """The state of a training and info's numbers of every step so far."""

    state: State
    log_SF: Float[np.ndarray, "S F"]

    @property
    def losses(self) -> list[float]:
        """The loss of every step, before its update."""
        return self.log_SF[:, 0].tolist()


def make_algorithm(
    prepare: Callable[[Tree, Any, Array], tuple[Objective, Any]],
    tx: optax.GradientTransformation,
    *,
    micro_batch: int = 0,
    report: Callable[[Array, Any, Tree], Any] = lambda loss, aux, grads: Loss(loss),
    fields: tuple[str, ...] = Loss._fields,
) -> Algorithm:
    """Returns the algorithm that descends an objective's gradient.

    prepare(frozen, batch, step) -> (objective, parts). For some rows of the parts the objective is
    their share of the batch's value: its divisors are found on the whole batch. `fields` are the
    fields of the info that `report` makes.
    """

    def init(params: Tree) -> State:
        return State(params=params, opt_state=tx.init(params), step=jnp.zeros((), jnp.int32))

    def step(state: State, frozen: Tree, batch: Any) -> tuple[State, Any]:
        objective, parts = prepare(frozen, batch, state.step)
        (loss, aux), grads = value_and_grad(
            objective, state.params, frozen, parts, micro_batch=micro_batch
        )
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        info = report(loss, aux, grads)
        return State(optax.apply_updates(state.params, updates), opt_state, state.step + 1), info

    return Algorithm(init, step, fields)


def value_and_grad(
    objective: Objective, params: Tree, frozen: Tree, batch: Any, *, micro_batch: int
) -> tuple[tuple[Array, Any], Tree]:
    """Returns ((value, aux), gradient) of a batch as jax.value_and_grad of the whole gives them.

    `batch` is a tree of arrays with one leading axis. At most micro_batch rows are held at a time;
    0 for all. The objective sums over rows, and parts are added up. Averaging would give the tokens
    of a short part more weight. The rows of each device are added once at the end.
    """
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1:
        raise ValueError(f"arrays of a batch must have equally many rows, got {sorted(sizes)}")
    # Its shapes and the loop over parts share one trace.
    differentiate = jax.jit(jax.value_and_grad(objective, has_aux=True), inline=True)

    def of_device(params: Tree, frozen: Tree, rows: Any) -> Any:
        held = _rows_held(micro_batch, {leaf.shape[0] for leaf in jax.tree.leaves(rows)})
        if not held:
            return differentiate(params, frozen, rows)
        parts = jax.tree.map(lambda leaf: leaf.reshape(-1, held, *leaf.shape[1:]), rows)

        def add_part(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, differentiate(params, frozen, part)), None

        first = jax.tree.map(lambda leaf: leaf[0], parts)
        start = jax.tree.map(jnp.zeros_like, jax.eval_shape(differentiate, params, frozen, first))
        total, _ = jax.lax.scan(add_part, start, parts)
        return total

    return meshes.sum_rows(of_device, params, frozen, rows=batch)


def _rows_held(micro_batch: int, sizes: Collection[int]) -> int:
    """Returns the rows that each device holds at a time for micro_batch in total; 0 for all."""
    if not micro_batch:
        return 0
    most, (rows,) = max(micro_batch // meshes.num_shards(), 1), sizes
    held = max(count for count in range(1, min(most, rows) + 1) if rows % count == 0)
    return 0 if held == rows else held


class _Log:
    """The numbers of every step: soon read, checked, and two shown next to the bar."""

    def __init__(
        self,
        log_SF: Float[np.ndarray, "S F"],
        fields: Sequence[str],
        *,
        bar: Any,
        watch: Any,
        refuse: Callable[[str], Diverged],
    ):
        self.log_SF = log_SF
        self._fields, self._bar, self._watch, self._refuse = fields, bar, watch, refuse
        self._unread: list[Any] = []
        self._looked = time.monotonic()

    def add(self, info: Any, *, is_whole: bool) -> None:
        """Takes the numbers of a step; with `is_whole` it reads all unread ones."""
        self._unread.append(info)
        # A CPU takes the memory of a step when it is called, so the host does not run ahead of it.
        ahead = len(self._unread) - (0 if meshes.platform() == "cpu" else _IN_FLIGHT)
        if ahead > 0:  # else the host runs ahead, and what is shown is old
            jax.block_until_ready(self._unread[ahead - 1])
        # Processes have clocks of their own, and all of a job have to end at the same step.
        is_late = processes.count() == 1 and time.monotonic() - self._looked > _LOOK_SECONDS
        count = len(self._unread) if is_whole else ahead if is_late or ahead >= _LOOK_EVERY else 0
        if count > 0:
            self._read(np.array(self._unread[:count], np.float32))
            del self._unread[:count]
            self._looked = time.monotonic()

    def _read(self, read_SF: Float[np.ndarray, "S F"]) -> None:
        done = len(self.log_SF)
        for row, field in np.argwhere(~np.isfinite(read_SF))[:1]:
            what = f"the {self._fields[field]} at step {done + 1 + row} is {read_SF[row, field]}"
            raise self._refuse(what)
        if self._watch:
            for number, row_F in enumerate(read_SF.tolist(), start=done + 1):
                self._watch.write(number, dict(zip(self._fields, row_F, strict=True)))
        shown = zip(self._fields[:2], read_SF[-1].tolist(), strict=False)
        text = ", ".join(f"{name} {value:.3f}" for name, value in shown)
        self._bar.set_postfix_str(text, refresh=False)
        self.log_SF = np.concatenate([self.log_SF, read_SF])


def fit(
    algorithm: Algorithm,
    params: Tree,
    frozen: Tree,
    batches: Callable[[int], Iterator[Any]],
    *,
    num_steps: int,
    what: str = "training",
    rate_flag: str = "the learning rate",
    bar: str = "",
    folder: pathlib.Path | None = None,
    save_every: int = 0,
    after: Mapping[int, Callable[[Tree], bool | None]] | None = None,
    watch: Any = None,
    on_divergence: Callable[[str], Any] | None = None,
) -> Progress:
    """Returns the state after this number of steps, and the numbers of each step.

    Args:
      batches: function from the number of steps taken to the batches that follow, in order.
      rate_flag: flag that an error advises to lower if the training of `what` diverges.
      bar: text before the progress bar; empty for no bar.
      folder: of this training's checkpoints, one every `save_every` steps; a killed one goes on.
      after: function that is called after a step with its number and the finite parameters. A
        resumed training calls it again for steps after the checkpoint. If it returns True the
        training ends.
      watch: receiver of each step's number and its numbers by name, soon after the step.
      on_divergence: function that gets the reason of a divergence. The training then ends with the
        last finite state that was checked. None raises an error.
    """
    after, fields = after or {}, algorithm.fields
    frozen, state = meshes.place((frozen, algorithm.init(params)))
    at, shapes = Progress(state, np.zeros((0, len(fields)), np.float32)), set[str]()

    def like(step: int) -> Progress:
        if step >= num_steps:
            raise ValueError(f"it has {step:,} steps, this training {num_steps:,}")
        return at._replace(log_SF=np.zeros((step, len(fields)), np.float32))

    def refuse(why: str) -> Diverged:
        mend = f"lower {rate_flag}, or check the weights that it starts from for NaN"
        return Diverged(f"{what} diverged: {why}; {mend}")

    if folder is not None and (saved := resuming.load_progress(folder, like)):
        print(f"    goes on after step {saved[0]:,} of {num_steps:,}")
        at = saved[1]
    step, state, done = jax.jit(algorithm.step), meshes.place(at.state), len(at.log_SF)
    bar_of_steps = progress(range(done + 1, num_steps + 1), bar, total=num_steps - done)
    with bar_of_steps as numbers, watch or contextlib.nullcontext(), _told(on_divergence):
        log = _Log(at.log_SF, fields, bar=numbers, watch=watch, refuse=refuse)
        for number, batch in zip(numbers, batches(done), strict=False):
            begin = time.monotonic()
            state, info = step(state, frozen, meshes.place_rows(batch))
            if (shape := str(jax.tree.map(np.shape, batch))) not in shapes:  # it has compiled
                shapes.add(shape)
                numbers.leave_out(time.monotonic() - begin)
            saves = bool(save_every) and number % save_every == 0 and number < num_steps
            is_whole = number in after or saves or number == num_steps
            log.add(info, is_whole=is_whole)
            if not is_whole:
                continue
            # The last step's loss is that of the weights before it: finite losses do not say it.
            if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params)):
                raise refuse(f"weights are not finite after step {number}")
            at = Progress(state, log.log_SF)
            if number in after and after[number](state.params):
                break
            if saves and folder is not None:
                resuming.save_progress(folder, number, at)
        else:
            if len(at.log_SF) < num_steps:
                raise ValueError(f"{what} must have {num_steps:,} batches, got fewer: add some")
    return at


@contextlib.contextmanager
def _told(on_divergence: Callable[[str], Any] | None) -> Iterator[None]:
    """Reports a divergence to the callback in place of the error."""
    try:
        yield
    except Diverged as error:
        if on_divergence is None:
            raise
        on_divergence(str(error))


def make_schedule(
    peak: float,
    num_steps: int,
    *,
    kind: Literal["linear", "cosine", "constant"],
    warmup: float = 0.0,
    warmup_steps: int = 0,
) -> optax.Schedule:
    """Returns a schedule: linear warm-up from 0 and then decay to zero, as in transformers.

    Args:
      peak: rate after the warm-up.
      num_steps: number of steps of the whole training.
      kind: kind of the decay.
      warmup: share of the steps for warm-up, rounded up.
      warmup_steps: number of these steps, in place of the share.
    """
    rising = warmup_steps or math.ceil(warmup * num_steps)
    decay_steps = max(1, num_steps - rising)
    decay = {
        "linear": optax.linear_schedule(peak, 0.0, decay_steps),
        "cosine": optax.cosine_decay_schedule(peak, decay_steps),
        "constant": optax.constant_schedule(peak),
    }[kind]
    rise = optax.linear_schedule(0.0, peak, rising)
    return optax.join_schedules([rise, decay], [rising]) if rising else decay


def adamw(
    rate: optax.ScalarOrSchedule,
    *,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> optax.GradientTransformation:
    """Returns AdamW behind clipping by global norm; 0 clips nothing."""
    adam = optax.adamw(rate, beta1, beta2, epsilon, weight_decay=weight_decay)
    return optax.chain(optax.clip_by_global_norm(clip), adam) if clip else adam


def sgd(
    rate: optax.ScalarOrSchedule, *, weight_decay: float = 0.0, clip: float = 1.0
) -> optax.GradientTransformation:
    """Returns plain gradient descent behind clipping by global norm; 0 clips nothing.

    Weight decay is added to the clipped gradient, as `torch.optim.SGD` does.
    """
    parts = [optax.clip_by_global_norm(clip)] if clip else []
    return optax.chain(*parts, optax.add_decayed_weights(weight_decay), optax.sgd(rate))
