"""The one family of exceptions that taso raises for what a user can act on."""


class TasoError(Exception):
    """Any error whose message is a sentence for the user."""


class ModelError(TasoError):
    """A model file or protobuf that cannot be read, or cannot be written."""


class InputNotFoundError(ModelError):
    """A node of a model names an input that nothing produces (TASO 0.1.0's name)."""


class GraphError(TasoError):
    """An operator was given arguments, attributes or types it does not take."""


class ShapeError(GraphError):
    """Shapes or dtypes do not fit the operator; the message prints them."""


class DimensionMismatch(ShapeError):
    """Two dimensions must be equal and are not.

    `left` and `right` hold them, so that a caller with free symbols can solve for one of them.
    """

    def __init__(self, message: str, left: object, right: object) -> None:
        super().__init__(message)
        self.left = left
        self.right = right


class RuleError(TasoError):
    """A rule or a rule file that cannot be read or applied."""


class InputError(TasoError):
    """Values given at run time do not match the inputs of the model."""


class SearchError(TasoError):
    """Settings of a search that make no sense, such as a negative budget."""


class BackendError(TasoError):
    """A backend failed to compile, measure or run something."""


class BackendUnavailable(BackendError):
    """A backend's library or device is not there; the message says how to get it."""


class TasoWarning(UserWarning):
    """Any warning of taso's: what was asked for is done, but not as the caller may think."""


class NaNWarning(TasoWarning):
    """A model holds weights that are not numbers; outputs are compared with NaN equal to NaN."""


class CallbackWarning(TasoWarning):
    """A callback raised an exception and was not called again; the result is as if it had not been there.

    Where it was raised as an error, `graph` is that result.
    """

    graph: object = None


class PluginWarning(TasoWarning):
    """An installed package announces rules or a backend that cannot be used; they are passed over."""


class FallbackWarning(TasoWarning):
    """Something runs elsewhere, or otherwise, than was asked for, and more slowly."""
