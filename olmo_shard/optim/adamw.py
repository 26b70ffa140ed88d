"""AdamW (Loshchilov and Hutter, 2019). ``kernels/fused_adamw.py`` has the formula."""

import torch
from torch import Tensor

from olmo_shard.kernels.fused_adamw import AdamWRates, AdamWTensors, adamw, pack_scalars
from olmo_shard.optim.update_rule import OptimizerSlice, StepScalars, UpdateRule


class AdamW(UpdateRule):
    """AdamW by the Triton kernel; by torch's fused kernel if the back end is ``reference``."""

    state_names = ("exp_avg", "exp_avg_sq")
    _packed: Tensor
    """Scalars of the step in the form in which the Triton kernel reads them."""

    def begin_step(self, scalars: StepScalars) -> None:
        """Pack the scalars for the Triton kernel."""
        if self.backend == "triton":
            # Once per step: the kernel of every segment reads the same four values.
            ones = torch.ones_like(scalars.skip)
            divisor = ones if scalars.divisor is None else scalars.divisor
            betas = self.config.beta1, self.config.beta2
            self._packed = pack_scalars(divisor, scalars.skip, scalars.step, *betas)

    def update(self, part: OptimizerSlice, scalars: StepScalars) -> None:
        """One step of AdamW on a slice."""
        if self.backend == "triton":
            self._update_by_triton(part, scalars.lr)
        else:
            self._update_by_torch(part, scalars)
            part.owned.update_model()

    def _update_by_torch(self, part: OptimizerSlice, scalars: StepScalars) -> None:
        config, state = self.config, part.state
        flats = part.owned.main, part.owned.gradient(), state["exp_avg"], state["exp_avg_sq"]
        # One call per distinct settings, for all its segments together.
        for settings, (main_params, grads, exp_avgs, exp_avg_sqs) in part.split(*flats):
            torch._fused_adamw_(
                main_params,
                grads,
                exp_avgs,
                exp_avg_sqs,
                [],
                [scalars.step] * len(main_params),
                lr=scalars.lr * settings.lr_multiplier,
                beta1=config.beta1,
                beta2=config.beta2,
                weight_decay=settings.weight_decay,
                eps=config.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=scalars.divisor,
                found_inf=scalars.skip,
            )

    def _update_by_triton(self, part: OptimizerSlice, lr: float) -> None:
        config, owned, state = self.config, part.owned, part.state
        flats = [owned.main, owned.gradient(), state["exp_avg"], state["exp_avg_sq"]]
        if owned.model_copy is not None:
            flats.append(owned.model_copy)
        # One launch per segment; it also writes the model's copy.
        for settings, lists in part.split(*flats):
            rates = AdamWRates(
                lr=lr * settings.lr_multiplier,
                weight_decay=settings.weight_decay,
                beta1=config.beta1,
                beta2=config.beta2,
                eps=config.eps,
            )
            for tensors in zip(*lists, strict=True):
                adamw(AdamWTensors(*tensors), self._packed, rates)
