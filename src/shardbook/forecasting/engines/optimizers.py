"""What torch's optimizers take while they step, by the kernel that does it."""

from collections.abc import Sequence

from shardbook.forecasting.choices import Choices


def kernel_of(choices: Choices) -> str:
    """The kernel whose temporaries count. SGD has none whatever its kernel, unless weights decay: torch/optim/sgd.py of torch 2.13.

    >>> kernel_of(Choices(kernel="foreach")), kernel_of(Choices(optimizer="sgd", kernel="foreach"))
    ('foreach', 'fused')
    """
    return choices.kernel if choices.optimizer == "adamw" else "fused"


def step_temporaries(kernel: str, parameters: Sequence[int]) -> int:
    """Most bytes that are live beside parameters, gradients and moments, for parameters of so many bytes each.

    ``fused``: none. ``for-loop``: the square root of the second moments, the denominator and the quotient of one parameter, two at a
    time. ``foreach``: the list of square roots, as large as all parameters. Source: torch/optim/adamw.py and adam.py of torch 2.13.

    >>> step_temporaries("foreach", [100, 300]), step_temporaries("for-loop", [100, 300]), step_temporaries("fused", [100])
    (400, 600, 0)
    """
    if kernel == "foreach":
        return sum(parameters)
    return 2 * max(parameters, default=0) if kernel == "for-loop" else 0
