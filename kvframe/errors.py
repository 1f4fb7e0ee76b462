"""Every error that kvframe raises on purpose. Each message is one sentence or two: what was expected, what came, what
to change. The command line prints it without a traceback and exits with status 2."""


class KvframeError(Exception):
    """Base of all errors that kvframe raises on purpose."""


class SpecError(KvframeError):
    """A pipeline spec is wrong: unknown stage or key, value out of range, stages that do not fit together."""


class PluginError(KvframeError):
    """A plugin cannot be used: it fails to import, registers a name twice or under a foreign prefix."""


class StageError(KvframeError):
    """A stage broke its contract: wrong shape, invalid plan, more entries than the budget."""


class BudgetError(KvframeError):
    """The budget cannot be met: it is smaller than what the spec protects."""


class ModelError(KvframeError):
    """The model cannot be used: not found, not readable, or its attention has no known contract."""


class InputError(KvframeError):
    """An argument or a file given by the user is unusable."""
