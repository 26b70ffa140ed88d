"""Which transport carries token rows between ranks: the candidates, and the one choice.

``CANDIDATES`` is the order of preference. ``olmo-shard check`` and preflight ask each candidate for
its problem on this machine. ``parallelize`` lets all ranks agree on the problems, and creates the
first candidate that can run. A new transport is one file in ``dispatch/`` and one candidate here.
"""

from typing import NamedTuple

from torch import nn

from olmo_shard.config import ParallelConfig
from olmo_shard.dispatch.collective import CollectiveTransport
from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.local import LocalTransport
from olmo_shard.dispatch.transport import Transport
from olmo_shard.distributed.agree import on_every_rank
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import ConfigurationError, HeapError
from olmo_shard.kernels.backend import Backend
from olmo_shard.nn.moe import MoE
from olmo_shard.parallel.rowwise_on_cpu import RowwiseOnCpu
from olmo_shard.parallel.rowwise_on_gpu import RowwiseOnGpu
from olmo_shard.parallel.transport_candidate import DispatchRequest, TransportCandidate


class Local(TransportCandidate):
    """All experts on one rank: rows do not travel."""

    name = "local"

    def applies_to(self, request: DispatchRequest) -> bool:
        """See :meth:`TransportCandidate.applies_to`."""
        return request.parallel.expert_parallel == 1

    def create(self, request: DispatchRequest, mesh: Mesh) -> tuple[Transport, str]:
        """See :meth:`TransportCandidate.create`."""
        return LocalTransport(), ""


class Collective(TransportCandidate):
    """All-to-all on gloo or NCCL, which runs everywhere."""

    name = "collective"

    def applies_to(self, request: DispatchRequest) -> bool:
        """See :meth:`TransportCandidate.applies_to`."""
        return True

    def create(self, request: DispatchRequest, mesh: Mesh) -> tuple[Transport, str]:
        """See :meth:`TransportCandidate.create`."""
        return CollectiveTransport(mesh.ep), ""


CANDIDATES: tuple[TransportCandidate, ...] = (
    Local(),
    RowwiseOnCpu(),
    RowwiseOnGpu(),
    Collective(),
)
"""In the order in which ``parallel.dispatch: auto`` tries them."""


class DispatcherChoice(NamedTuple):
    """How the MoE layers of a model reach their experts."""

    dispatcher: TokenDispatcher
    note: str
    """What was chosen and why, for the log."""


def install_dispatcher(
    model: nn.Module,
    mesh: Mesh,
    config: ParallelConfig,
    max_tokens: int | None,
    backend: Backend = "reference",
) -> DispatcherChoice | None:
    """Give every MoE layer of a model its dispatcher and its back end; collective over all ranks.

    All layers share one dispatcher: it asserts that at most one exchange is outstanding.

    :param max_tokens: largest number of tokens per rank and micro-batch, which sizes mailboxes.
    :param backend: back end that computes the routed experts.
    :returns: ``None`` for a model without MoE layers.
    :raises ConfigurationError: if the transport that the config names cannot run here.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        return None
    # All MoE layers of a model have the same sizes, so the first layer stands for all.
    router = layers[0].router
    request = DispatchRequest(
        parallel=config,
        num_experts=router.num_experts,
        top_k=router.top_k,
        width=router.gate.in_features,
        max_tokens=max_tokens,
        device_type=mesh.device.type,
        backend=backend,
    )
    choice = _create_first(request, mesh)
    for layer in layers:
        layer.dispatcher, layer.experts.backend = choice.dispatcher, backend
    return choice


def describe_dispatcher(request: DispatchRequest, ranks_on_host: int) -> str:
    """How token rows would travel on this machine, for ``olmo-shard check``.

    :param ranks_on_host: number of ranks that will share the memory of this host.
    :raises ConfigurationError: if the transport that the config names cannot run here.
    """
    problems: list[str] = []
    for candidate in _candidates(request):
        problem = candidate.problem(request, ranks_on_host)
        if problem is None:
            return ": ".join([candidate.describe(request, ranks_on_host), *problems])
        problems.append(f"{candidate.name} cannot run here: {problem}")
    raise _refusal(problems)


def _candidates(request: DispatchRequest) -> list[TransportCandidate]:
    """The candidates that ``parallel.dispatch`` allows, in order."""
    wanted = request.parallel.dispatch
    return [
        candidate
        for candidate in CANDIDATES
        if candidate.applies_to(request) and wanted in ("auto", candidate.name)
    ]


def _create_first(request: DispatchRequest, mesh: Mesh) -> DispatcherChoice:
    """The first candidate that can run on all ranks."""
    config, problems = request.parallel, []
    for candidate in _candidates(request):
        try:
            # All ranks raise the same error, or none does, so all take the same candidate.
            _agree_on_problem(candidate, request, mesh)
            transport, memory = candidate.create(request, mesh)
        except HeapError as error:
            problems.append(f"{candidate.name} cannot run here: {error}")
            continue
        dispatcher = TokenDispatcher(
            transport, request.num_experts, config.capacity_factor, request.backend
        )
        chosen = f"{candidate.name} (parallel.dispatch = {config.dispatch})"
        notes = [note for note in (chosen, memory, *problems) if note]
        return DispatcherChoice(dispatcher, ": ".join(notes))
    raise _refusal(problems)


def _agree_on_problem(candidate: TransportCandidate, request: DispatchRequest, mesh: Mesh) -> None:
    """Collective.

    :raises HeapError: on all ranks, with the problem of the first rank that has one.
    """

    def raise_problem() -> None:
        """Raise the problem of this rank."""
        if problem := candidate.problem(request):
            raise HeapError(problem)

    on_every_rank(mesh.control, raise_problem)


def _refusal(problems: list[str]) -> ConfigurationError:
    """The error if the transport that the config names cannot run."""
    return ConfigurationError(
        f"parallel.dispatch = {'; '.join(problems)}; use collective, or auto, which takes the "
        "first transport that can run"
    )
