"""Hold the columns of one weight: which are hot and which cold, where the state of each side lies, and how columns change
sides.

    on the device    hot, cold       int32 [H], [C]         the columns of each slot; together all columns, each once
                     w_hot m_hot v_hot  float32 [H, O]      weight and moments of the hot columns, a slot each
                     t_hot           int32 [H]              updates that each has had
    on the host      w m v           float32 [C, O]         the same of the cold ones
                     t_cold          int32 [C]
                     acc             float32 [B, C, O]      sums of gradients, one or, with overlap, two
                     counts, rates   int64, float64 [B]     how many gradients are in a sum; the sum of their learning rates
                     out             [C, O], W's dtype      result of an update of the host, on its way to the weight

These tensors are the parameter's entry in the optimizer's state; `Columns` is a view of it and keeps nothing of its own but the
order of the slots as the host knows it. A column that changes sides takes all of its state along, bit for bit, into the
slot of the one that it changes with: so nothing else moves. A parameter that is hot as a whole is one column.

This file knows tensors and a link, no threads and no schedule: zenflow.py says when.

    O rows of the weight here, its outputs; I its columns, its inputs; H, C hot and cold ones; B sums; N columns that move
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surokit.offload.link import Link, PendingCopy
from surokit.offload.rows import add_rows_, block, gather, regrouped, scatter_, update_columns_, update_rows_
from surokit.offload.swaps import Swaps
from surokit.offload.workers import beat
from surokit.offload.written import adopt_before_, sync_master_
from surokit.optim.tensors import gradients_of, local

TRANSFER_BYTES = 64 * 2**20  # at most, of one transfer
SWAP_BYTES = 16 * 2**20  # of one that changes columns
STACK_FROM = 32  # columns, from which a weight of three dimensions is a stack of matrices
STATES = 3  # of an element: weight and two moments
_BLOCK = 1 << 24  # elements that are widened to float32 at a time

# what has a parameter's rows last, and how many dimensions come before them
ALONG_ROWS = {"w_hot": 1, "m_hot": 1, "v_hot": 1, "w": 1, "m": 1, "v": 1, "acc": 2, "out": 1}
HOST = ("w", "m", "v", "t_cold", "acc", "counts", "rates", "out")


def hot_columns(ratio: float, columns: int) -> int:
    """Return how many of a weight's columns are hot: max(1, floor(ratio * columns)); none where the ratio is 0."""
    return min(columns, max(1, math.floor(ratio * columns))) if ratio else 0


def pieces(rows: int, row_bytes: int, limit: int = TRANSFER_BYTES) -> list[slice]:
    """Divide the rows into transfers of at most `limit` bytes, or of one row."""
    size = max(1, limit // max(1, row_bytes))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def check_dense(p: Tensor) -> None:
    """Check that a parameter can be offloaded; raises ValueError where it is complex or of integers, or its gradient is sparse."""
    if not p.is_floating_point():
        raise ValueError(f"A parameter of shape {list(p.shape)} is {p.dtype}: train its torch.view_as_real.")
    if p.grad is not None and p.grad.is_sparse:
        raise ValueError(f"The gradient of a parameter of shape {list(p.shape)} is sparse: use a dense one.")


def several_devices(one: torch.device, other: torch.device) -> ValueError:
    """Return the error for parameters on several devices: an optimizer keeps states for one device. A plan refuses it too
    (surokit/planner/planning.py)."""
    return ValueError(
        f"The parameters are on several devices, {one} and {other}: put the model on one. Trained weights that offload_weights "
        "keeps on the host are updated there: give sk.AdamW."
    )


class Columns:
    """Columns is the view of the columns of parameter `p`.

    splits: whether columns are hot or cold; otherwise the parameter is hot as a whole, as one column.
    number: of the parameter in its optimizer.
    """

    def __init__(self, p: Tensor, state: dict[str, Any], splits: bool, number: int) -> None:
        self.p, self.state, self.splits, self.number = p, state, splits, number
        self.hot_order: Tensor = state["hot"].cpu() if state else torch.empty(0, dtype=torch.int32, device="cpu")
        self.cold_order: Tensor = state["cold"].cpu() if state else torch.empty(0, dtype=torch.int32, device="cpu")
        self.landing: Sequence[PendingCopy] = ()  # transfers out of `out`

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["state"][name]
        except KeyError:
            raise AttributeError(name) from None

    # -- the weight and its gradient, as this process holds them

    @property
    def weight(self) -> Tensor:
        """Return the weight as [O, I], in the parameter's own memory."""
        W = local([self.p])[0].detach()
        return W if self.splits and W.ndim == 2 else W.view(self._shape(W))

    @property
    def gradient(self) -> Tensor:
        """Return the gradient as [O, I]."""
        (g,) = gradients_of([self.p])
        return g if self.splits and g.ndim == 2 else g.reshape(self._shape(g))

    def _shape(self, t: Tensor) -> tuple[int, int]:
        if not self.splits:
            return t.numel(), 1
        # of three dimensions a long last one is that of experts' matrices, a short one a convolution's kernel
        rows = 2 if t.ndim == 3 and t.shape[2] >= STACK_FROM else 1
        return math.prod(t.shape[:rows]), math.prod(t.shape[rows:])

    @property
    def row_dims(self) -> int:
        """Return how many of the parameter's first dimensions are its rows; all of one that is hot as a whole."""
        rows, dims = self._shape(self.p)[0], range(1, self.p.ndim)
        return next((n for n in dims if math.prod(self.p.shape[:n]) == rows), self.p.ndim)

    @property
    def divided(self) -> bool:
        """Return whether the weight has hot and cold columns, so that there is something to choose."""
        return bool(len(self.hot_order) and len(self.cold_order))

    # -- the beginning

    def check(self, device: torch.device) -> None:
        """Check that the parameter's columns can be told apart, and moved from and to `device`; raises ValueError otherwise."""
        W, shape = local([self.p])[0], list(self.p.shape)
        if W.device != device:
            raise several_devices(W.device, device)
        check_dense(self.p)
        if not W.is_contiguous() and not (W.ndim < 2 or (W.ndim == 2 and self.splits)):
            raise ValueError(
                f"A parameter of shape {shape} is not contiguous in memory: make it so with .contiguous()."
            )
        if self.splits and any(
            placement.is_shard() and placement.dim != 0 for placement in getattr(self.p, "placements", ())
        ):
            raise ValueError(
                f"A parameter of shape {shape} is sharded along its columns, and each process has to hold whole ones: shard "
                'it along dimension 0, as fully_shard does, or put it in a parameter group with "offload": False.'
            )

    def begin(self, ratio: float, sums: int, link: Link) -> list[PendingCopy]:
        """Make the state: the first columns are hot, moments are 0. The cold ones' weights come down into `out`; call
        `settle` afterwards."""
        W = self.weight
        H, C, rows = self.sizes(ratio)
        every = torch.arange(H + C, dtype=torch.int32, device="cpu")
        self.hot_order, self.cold_order = every[:H].clone(), every[H:].clone()
        self.state["hot"], self.state["cold"] = on(W.device, self.hot_order), on(W.device, self.cold_order)
        self.state["t_hot"] = torch.zeros(H, dtype=torch.int32, device=W.device)
        for name in ("w_hot", "m_hot", "v_hot"):
            self.state[name] = torch.zeros(H, rows, device=W.device)
        if W.numel():
            gather(W, self.hot, self.w_hot)
        if not C:
            return []
        for name in ("w", "m", "v"):
            self.state[name] = link.buffer((C, rows), torch.float32)
        self.state["acc"] = link.buffer((sums, C, rows), torch.float32)
        self.state["out"] = link.buffer((C, rows), W.dtype)
        self.state["t_cold"] = torch.zeros(C, dtype=torch.int32, device="cpu")
        self.state["counts"] = torch.zeros(sums, dtype=torch.int64, device="cpu")
        self.state["rates"] = torch.zeros(sums, dtype=torch.float64, device="cpu")
        for x in (self.m, self.v, self.acc):  # a sum is written before it is read, and saved before that
            x.zero_()
        return self.send(W, self.out, link)

    def settle(self, tickets: Sequence[PendingCopy]) -> None:
        """Complete `begin`: set the float32 weights of the cold columns."""
        for ticket in tickets:
            ticket.wait()
        if len(self.cold_order):
            self.w.copy_(self.out)

    def sizes(self, ratio: float) -> tuple[int, int, int]:
        """Return (H, C, O)."""
        rows, columns = self.weight.shape
        H = hot_columns(ratio, columns) if self.splits else columns
        return H, columns - H, rows

    def check_fits(self, state: Mapping[str, Any], ratio: float) -> None:
        """Check a saved state; raises ValueError where it is not this parameter's."""
        H, C, rows = self.sizes(ratio)
        found = tuple(state["w_hot"].shape), len(state["cold"])
        if found != ((H, rows), C):
            raise ValueError(
                f"The state of parameter {self.number} has {found[0][0]} hot and {found[1]} cold columns of {found[0][1]}, "
                f"where the parameter has {H} and {C} of {rows}: load it into an optimizer over the same parameters."
            )

    def fit_out(self, link: Link) -> None:
        """Make `out` anew where the state is of weights of another dtype: what waits there to land is the cold columns' weights."""
        if len(self.cold_order) and self.out.dtype != (dtype := self.weight.dtype):
            self.state["out"] = link.buffer(self.out.shape, dtype).copy_(self.w)

    def take_over(self, link: Link) -> None:
        """Take over a state that another optimizer left, with the weights as they are there; the gradients summed of a
        window are dropped."""
        if len(self.cold_order):
            self.counts.zero_()
            self.rates.zero_()
            self.out.copy_(self.w)
            self.land(link)

    def adopt(self, link: Link, update: Mapping[str, Any] | None = None) -> int:
        """Let the masters take over values that were written into the weight by hand; return the bytes that came down for
        it, and have arrived.

        update: options of the update that waits in `out`; it is then made on the new values, and still waits. Without one,
        `out` holds nothing that could land.
        """
        W = self.weight
        if W.numel() and len(self.hot_order):
            shown = torch.empty_like(self.w_hot, dtype=W.dtype)
            gather(W, self.hot, shown)
            sync_master_(self.w_hot, shown)
        if not len(self.cold_order):
            return 0
        for ticket in self.landing:
            ticket.wait()
        coming = self.send(W, self.out, link)
        with link.host_waits():
            for part, ticket in zip(self.pieces(self.out), coming, strict=True):
                ticket.wait()
                if update is None:
                    sync_master_(self.w[part], self.out[part])
                else:
                    self._adopt_before(part, update)
        return int(self.out.nbytes)

    def _adopt_before(self, part: slice, update: Mapping[str, Any]) -> None:
        """Adopt in these rows. w, m, v and clocks are those after `update`; `out` holds the weight as it was written, and
        becomes the update that is to land."""
        lr, (beta1, beta2), decay = update["lr"], update["betas"], 1 - update["lr"] * update["weight_decay"]
        clocks_C1 = self.t_cold[part, None].double()
        size_C1, root_C1 = (lr / (1 - beta1**clocks_C1)).float(), (1 - beta2**clocks_C1).sqrt().float()
        w, m, v, out = (x[part] for x in (self.w, self.m, self.v, self.out))
        for some in pieces(len(w), 4 * w.shape[1], 4 * block()):
            for strip in pieces(w.shape[1], 4, 4 * block()):
                at = some, strip
                step = size_C1[some] * m[at] / (v[at].sqrt() / root_C1[some] + update["eps"])
                adopt_before_(w[at], out[at], step, decay)
        out.copy_(w)

    # -- a step

    def update_hot(
        self, g_OI: Tensor, options: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Update the hot columns by AdamW with this step's gradient; the weight takes their values."""
        if g_OI.numel() and len(self.hot_order):
            states = (self.w_hot, self.m_hot, self.v_hot, self.t_hot)
            update_columns_(self.weight, g_OI, self.hot, *states, grad_scale=grad_scale, found_inf=found_inf, **options)

    def send(self, src_OI: Tensor, to_CO: Tensor, link: Link) -> list[PendingCopy]:
        """Send the cold columns of `src` to `to`, with a transfer for each of `self.pieces(to)`."""

        def fill(index: Tensor) -> Callable[[Tensor], None]:
            return lambda staging: gather(src_OI, index, staging)

        return [
            link.down(fill(index), to_CO[part], reads=(src_OI, index))
            for part in self.pieces(to_CO)
            for index in (self.cold[part],)
        ]

    def pieces(self, rows_CO: Tensor) -> list[slice]:
        return pieces(len(rows_CO) if rows_CO.numel() else 0, rows_CO.shape[1] * rows_CO.element_size())

    # -- the host's part: in its threads

    def accumulate(
        self, b: int, slot_CO: Tensor, tickets: Sequence[PendingCopy], scale: float | None, lr: float, counts: bool
    ) -> None:
        """Add a step's gradients to sum b as they arrive; those of a step that does not count are only waited for."""
        first = not int(self.counts[b])
        for part, ticket in zip(self.pieces(slot_CO), tickets, strict=True):
            ticket.wait()
            if counts:
                add_rows_(self.acc[b, part], slot_CO[part], scale, first)
        self.counts[b] += counts
        self.rates[b] += lr * counts

    def update_cold(self, b: int, options: dict[str, Any], corrected: bool) -> dict[str, Any] | None:
        """Update the cold columns by AdamW with the mean of sum b, which is empty then; the result is in `out`. Returns the
        options that held, or None where no gradient was summed.

        corrected: the update stands for as many steps as it has gradients, each with its own learning rate.
        """
        count = int(self.counts[b])
        if not count:
            return None
        if corrected:
            options = {**options, "lr": float(self.rates[b])}
        of_sum: dict[str, Any] = {"divide_by": count if count > 1 else None, "elapsed": count if corrected else 1}
        update_rows_(self.w, self.m, self.v, self.acc[b], self.t_cold, **of_sum, **options)
        for ticket in self.landing:
            ticket.wait()
        self.out.copy_(self.w)
        self.counts[b] = 0
        self.rates[b] = 0.0
        return options

    # -- back to the weight

    def land(self, link: Link) -> int:
        """Copy `out` into the weight's cold columns; return its bytes."""
        W = self.weight

        def take(index: Tensor) -> Callable[[Tensor], None]:
            return lambda staging: scatter_(W, index, staging)

        self.landing = [link.up(self.out[part], take(self.cold[part])) for part in self.pieces(self.out)]
        return self.out.nbytes

    # -- which columns are hot

    def choose(self, scores_I: Tensor, found_inf: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (int32 [H], the columns with the largest scores, among equals the lower one; their share of all scores,
        0-d).

        A step that is not finite chooses those that are hot already, and its share is NaN.
        """
        chosen = torch.sort(scores_I, descending=True, stable=True).indices[: len(self.hot_order)]
        share = scores_I[chosen].sum() / scores_I.sum()
        chosen = chosen.to(torch.int32)
        if found_inf is not None:
            bad = found_inf != 0
            chosen = torch.where(bad, self.hot, chosen)
            share = share.masked_fill(bad, torch.nan)
        return chosen, share

    def exchange(
        self, chosen_H: Tensor, clocks_H: Tensor, betas: tuple[float, float], link: Link, swaps: Swaps
    ) -> tuple[int, int]:
        """Make the chosen columns the hot ones; return (how many change sides, bytes that move each way).

        chosen, clocks: on the host; the clocks are those of the columns that are hot so far. The thread of `swaps` puts the
        arriving states into w, m and v; it has to be done before anything else uses them.
        """
        slots = torch.isin(self.hot_order, chosen_H, invert=True).nonzero().view(-1)  # whose columns leave the device
        rows = torch.isin(self.cold_order, chosen_H).nonzero().view(-1)  # whose columns leave the host
        if not len(slots):
            return 0, 0
        device, column_bytes = self.hot.device, STATES * 4 * self.w.shape[1]
        here = on(device, slots)
        parts = pieces(len(slots), column_bytes, SWAP_BYTES) if column_bytes else []
        for part in parts:
            self._swap(here[part], rows[part], link, swaps)
        self.t_hot.index_copy_(0, here, on(device, self.t_cold[rows]))
        self.t_cold[rows] = clocks_H[slots]
        self.hot_order[slots], self.cold_order[rows] = self.cold_order[rows], self.hot_order[slots]
        to, source = regrouped(self.t_cold, betas)  # equal clocks come together: an update is a call for each run
        for x in (self.t_cold, self.cold_order):
            x[to] = x[source]
        self.hot.copy_(on(device, self.hot_order))
        self.cold.copy_(on(device, self.cold_order))

        def regroup() -> None:
            for x in (self.w, self.m, self.v):
                x.index_copy_(0, to, x.index_select(0, source))
                beat()

        swaps.then(regroup)
        return len(slots), column_bytes * len(slots)

    def _swap(self, slots_N: Tensor, rows_N: Tensor, link: Link, swaps: Swaps) -> None:
        """Exchange the states of these slots and rows."""
        hot, cold = (self.w_hot, self.m_hot, self.v_hot), (self.w, self.m, self.v)
        leaving, entering = swaps.pair((STATES, len(rows_N), self.w.shape[1]))

        def fill(staging: Tensor) -> None:
            for part, x in zip(staging, hot):
                torch.index_select(x, 0, slots_N, out=part)

        def take(staging: Tensor) -> None:
            for part, x in zip(staging, hot):
                x.index_copy_(0, slots_N, part)

        for part, x in zip(entering, cold):
            torch.index_select(x, 0, rows_N, out=part)
        down = link.down(fill, leaving, reads=(*hot, slots_N))
        link.fence()  # what enters overwrites what leaves
        up = link.up(entering, take)

        def empty() -> None:
            down.wait()
            for part, x in zip(leaving, cold):
                x.index_copy_(0, rows_N, part)
                beat()
            up.wait()

        swaps.emptied_by(empty)

    # -- numbers about the gradient, sums over the rows of this process

    def energies(self, g_OI: Tensor) -> Tensor:
        """Return float32 [I], the sum of squares of each column."""
        return _column_sums(g_OI, lambda part: part.square_())

    def magnitudes(self, g_OI: Tensor) -> Tensor:
        """Return float32 [2], the mean |g| of the cold and of the hot columns; of a sharded weight, this process's part of
        them."""
        sums = _column_sums(g_OI, lambda part: part.abs_())
        return torch.stack(
            [
                sums.index_select(0, index).sum() / (len(index) * self._shape(self.p)[0])
                for index in (self.cold, self.hot)
            ]
        )


def _column_sums(g_OI: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return float32 [I], the column sums of float32 copies of rows, after `of` has changed these in place."""
    rows = max(1, _BLOCK // max(1, g_OI.shape[1]))
    parts = [of(part.to(torch.float32, copy=True)).sum(0) for part in g_OI.split(rows)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def on(device: torch.device, value: Tensor) -> Tensor:
    """Return a copy of a small host tensor on the device, which the host does not wait for."""
    return value.clone() if device.type == "cpu" else value.pin_memory().to(device, non_blocking=True)


def placed(name: str, value: Tensor, device: torch.device, link: Link) -> Tensor:
    """Return a copy of an entry of the state where it belongs."""
    if name not in HOST:
        return value.to(device, copy=True)
    to = (
        link.buffer(value.shape, value.dtype)
        if value.ndim > 1
        else torch.empty(value.shape, dtype=value.dtype, device="cpu")
    )
    return to.copy_(value)


def summed(values: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """Sum each value over the processes that hold other rows of its parameter, in one exchange a mesh."""
    found = list(values)
    together: dict[Any, list[int]] = {}
    for i, p in enumerate(params):
        if axes := _sharded_axes(p):
            together.setdefault((p.device_mesh, axes), []).append(i)  # type: ignore[attr-defined]
    for (mesh, axes), at in together.items():
        flat = torch.cat([found[i].reshape(-1) for i in at])
        for axis in axes:
            torch.distributed.all_reduce(flat, group=mesh.get_group(axis))
        for i, part in zip(at, flat.split([found[i].numel() for i in at])):
            found[i] = part.view_as(found[i])
    return found


def _sharded_axes(p: Tensor) -> tuple[int, ...]:
    return tuple(axis for axis, placement in enumerate(getattr(p, "placements", ())) if placement.is_shard())
