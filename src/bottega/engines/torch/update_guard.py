"""Guard of the optimizer step: updates with a non-finite loss or gradient are skipped, and fp16 has a loss scale."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE, GROWTH = "loss_scale/scale", "loss_scale/growth"


class UpdateGuard:
    """Decides on the device, without a sync, whether the update of a step is skipped.

    Unless `continues`, every update after a bad step is skipped until `reset`, so that the trainer finds the weights as
    they were before the bad step. `scale` is the loss scale of fp16, None for other precisions.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, continues: bool) -> None:
        self._continues = continues
        self._nan_after_bad_step, self.bad_steps = (torch.zeros((), device=device) for _ in range(2))
        self.scale = torch.full((), 2.0**16, device=device) if dtype is torch.float16 else None
        self.growth = torch.zeros((), dtype=torch.int32, device=device)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale."""
        return loss if self.scale is None else loss * self.scale

    def check(self, probe: Tensor, *, is_skipped: bool) -> Tensor:
        """Return 1 on the device if the update must be skipped: `probe` is not finite, or `is_skipped`."""
        # x - x is 0 for a finite number and NaN for inf and NaN, so no sync with the device is needed.
        nan_if_bad = self._nan_after_bad_step if is_skipped else (probe - probe) + self._nan_after_bad_step
        skip_update = nan_if_bad.ne(0).float()
        if self.scale is None:
            self.bad_steps += skip_update
            if not self._continues:
                self._nan_after_bad_step = nan_if_bad  # skips all later updates until the trainer calls `reset`
        else:
            # fp16 overflows regularly: the update is skipped and the loss scale halved.
            torch._amp_update_scale_(self.scale, self.growth, skip_update, 2.0, 0.5, 2000)
            self.bad_steps += (self.scale < 2.0**-10).float()
        return torch.ones_like(skip_update) if is_skipped else skip_update

    def reset(self) -> None:
        """Apply updates again, after the bad steps were handled."""
        self._nan_after_bad_step = torch.zeros_like(self._nan_after_bad_step)
        self.bad_steps.zero_()

    def state(self) -> dict[str, Tensor]:
        """Return the loss scale, for a checkpoint."""
        return {} if self.scale is None else {SCALE: self.scale, GROWTH: self.growth}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the loss scale; the state is empty if the run had another precision before."""
        if self.scale is not None and state:
            self.scale.copy_(state[SCALE])
            self.growth.copy_(state[GROWTH])
