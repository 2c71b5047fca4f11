"""The standard form of a DDP hook, ``model.register_comm_hook(state, hook)``, and its copies.

Tools that wrap the model themselves take a state and a hook before there is a model. So this state
finds its model later: at ``attach``, or at the first bucket, which DDP hands over on all ranks at
the same point.

A registration cannot be copied, since it belongs to a reducer in C++. What a copy of a managed
model holds in its place says so when it is used.

This module must not postpone annotations: DDP compares those of the hook with real classes.
"""

import gc
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradpilot.errors import AttachError, ConfigError

if TYPE_CHECKING:
    from gradpilot.worker_agent.handle import Handle
    from gradpilot.worker_agent.hook import Pipeline


class HookState:
    """State of one model's hook: ``model.register_comm_hook(HookState(), gradpilot.hook)``.

    It pickles as its settings and the handle's state, and registered with a new model it goes on
    from there. Every rank has its own.

    Args:
        **settings: What ``attach`` takes beside the model.

    Attributes:
        handle: The handle, from the first bucket or from ``attach`` on; None before.
        attaching: Whether ``attach`` is under way.
        in_backward: Whether it is because of the first bucket, so that DDP holds its lock.
    """

    def __init__(self, **settings: Any) -> None:
        self.handle: Handle | None = None
        self.attaching = False
        self.in_backward = False
        self._settings = settings
        self._resume: dict[str, Any] | None = None

    def on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Hand a bucket to the gradient path; the first one attaches the model.

        Raises:
            AttachError: The model cannot be managed.
        """
        handle = self.handle
        if handle is None:
            self.in_backward = True
            try:
                handle = self.attach(self._model())
            finally:
                self.in_backward = False
        return handle._pipeline.on_bucket(bucket)

    def attach(self, model: DistributedDataParallel) -> "Handle":
        """Attach the model that this state is registered with, before its first bucket does.

        All ranks alike, see ``gradpilot.attach``.

        Raises:
            AttachError: The model cannot be managed.
        """
        from gradpilot.worker_agent.agent import attach  # which needs this module

        self.attaching = True
        try:
            self.handle = attach(model, **self._settings)
        finally:
            self.attaching = False
        resume, self._resume = self._resume, None
        if resume is not None:
            self.handle.load_state_dict(resume)
        return self.handle

    def _model(self) -> DistributedDataParallel:
        # DDP passes no model on to a hook, and it is asked once in the life of a job.
        owners: list[DistributedDataParallel] = [
            item
            for item in gc.get_objects()
            if issubclass(type(item), DistributedDataParallel)
            and any(state is self for _, state in getattr(item, "_comm_hooks", ()))
        ]
        if len(owners) != 1:
            raise AttachError(
                f"expected one DDP model with this HookState, found {len(owners)}; make one"
                " HookState a model and register it with model.register_comm_hook"
            )
        return owners[0]

    def __getstate__(self) -> dict[str, Any]:
        if self._settings.get("grad_scaler") is not None:
            raise ConfigError(
                "a HookState is pickled without its GradScaler's link to training, got one with"
                " grad_scaler; save state.handle.state_dict() instead"
            )
        resume = self.handle.state_dict() if self.handle is not None else self._resume
        return {"settings": self._settings, "resume": resume}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["settings"])  # type: ignore[misc]
        self._resume = state["resume"]


class LeftBehind:
    """What a copy of a managed DDP model has where the original has its gradient path."""

    def on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Refuse a bucket: whoever registered a copied state expects it to work.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "expected the hook state of a model that was attached, got a copy of one, which holds"
            " nothing; call gradpilot.attach(model) and load handle.state_dict() into the handle"
        )


def hook(state: "Pipeline | HookState | LeftBehind", bucket: GradBucket) -> Future[Tensor]:
    """Hand a bucket to the gradient path; this is what DDP registers.

    Raises:
        ConfigError: It was registered with a state that is none.
    """
    try:
        on_bucket = state.on_bucket
    except AttributeError:
        raise ConfigError(
            f"gradpilot.hook expects a gradpilot.HookState as its state, got {state!r};"
            " register it with model.register_comm_hook(gradpilot.HookState(), gradpilot.hook)"
        ) from None
    return on_bucket(bucket)
