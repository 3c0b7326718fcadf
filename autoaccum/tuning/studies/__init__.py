"""Studies of Optuna: where they are kept, how trials are drawn, run, lost, taken up again and repeated."""

from autoaccum.errors import UsageError

try:
    import optuna as _optuna  # noqa: F401
except ImportError as error:
    raise UsageError(f"tuning needs Optuna, which cannot be imported ({error})", hint="pip install optuna") from None
