"""Where a training framework wraps the model itself: one module each, imported by whoever uses it.

None is needed under ``torchrun ... -m gradpilot.worker_agent`` or ``gradpilot.auto``, which manage
what these frameworks wrap as well. They add what only the framework knows: the handle, the loss
scaler, the loss and learning rate, and a place in its checkpoints.
"""
