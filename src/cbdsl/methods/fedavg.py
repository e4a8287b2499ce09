"""FedAvg (McMahan et al. 2017): everybody trains from w_t, everybody uploads, the server averages."""

from __future__ import annotations

from cbdsl import register
from cbdsl.methods.base import AveragingMethod


@register.method("fedavg")
class FedAvg(AveragingMethod):
    """Everybody trains from the server's model and uploads; the server averages."""

    title = "FedAvg (McMahan et al. 2017)"
