"""Defines paredown's exceptions, whose messages say what is wrong, where, and what to do next."""

LONGEST = 2000  # characters of a message; text quoted from a file can have any length


class ParedownError(Exception):
    """Serves as the base class of all exceptions that paredown raises itself."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


class FormatError(ParedownError, ValueError):
    """Raised for a number format, or a type of element in it, that is misspelled or cannot exist."""


class CodecError(ParedownError, ValueError):
    """Raised for a tensor that cannot be encoded or decoded in the requested format."""


class PlanError(ParedownError, ValueError):
    """Raised for a plan that is invalid, or that has a rule which matches no tensor of the model."""


class CalibrationError(ParedownError, RuntimeError):
    """Raised for a calibration (measured speeds) that is missing, of another device or version, or not measurable."""


class TraceError(ParedownError, RuntimeError):
    """Raised for a training step that cannot be traced with fake tensors."""


class ApplyError(ParedownError, RuntimeError):
    """Raised for a plan that cannot be applied to this model in its current state."""


class CheckpointError(ParedownError, ValueError):
    """Raised for files of weights that cannot be read or written, or that belong to another model."""


class VerificationError(ParedownError, RuntimeError):
    """Raised if gradients under a plan differ from those of the unmodified model by more than the tolerance."""


class BudgetError(ParedownError, ValueError):
    """Raised for a size that cannot be parsed or a budget that no plan fits; `smallest_bytes` is what would fit."""

    smallest_bytes: int | None = None


class OptimError(ParedownError, RuntimeError):
    """Raised for an option that an optimizer does not support, or a state_dict of another optimizer."""


class SweepError(ParedownError, ValueError):
    """Raised for a sweep (many trainings) whose description is invalid, or that cannot continue."""


class StoreError(ParedownError, RuntimeError):
    """Raised for a database of trials (measured trainings) that cannot be opened, read or written."""


class ReportError(ParedownError, ValueError):
    """Raised for the JSON record of a report that cannot be read, or a report page that cannot be written or served."""


class TaskError(ParedownError, ValueError):
    """Raised for a task (a model, its data and its loss) that does not exist, or whose parts are inconsistent."""


class PriorError(ParedownError, ValueError):
    """Raised for a prior (results of earlier trainings) that cannot be read or written, or whose name is unknown."""
