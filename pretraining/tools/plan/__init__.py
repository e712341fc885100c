"""Memory, communication and time of a configuration on devices that are not present."""

from pretraining.config.extension import Extension
from pretraining.tools.plan.checks import CHECKS
from pretraining.tools.plan.settings import PlanConfig


def plan_instead(config: PlanConfig) -> int | None:
    """Print the plan and return 0 if the configuration asks for one."""
    if not config.plan:
        return None
    from pretraining.tools.plan.show import show

    return show(config)


EXTENSION = Extension(configuration=PlanConfig, checks=CHECKS, instead=plan_instead)
