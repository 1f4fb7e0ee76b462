"""Evaluation: tasks, fidelity to the full cache, and the comparison of pipelines."""

from kvframe.eval.compare import Comparison, Settings, compare, open_results
from kvframe.eval.contenders import Contender, make_contenders
from kvframe.eval.fidelity import kl_divergence, negative_log_likelihood, top1_agreement
from kvframe.eval.table import markdown, print_table
from kvframe.eval.tasks import TASKS, Example, Source, make_tasks
from kvframe.eval.text import embedded_text, read_text

__all__ = [
    "TASKS",
    "Comparison",
    "Contender",
    "Example",
    "Settings",
    "Source",
    "compare",
    "embedded_text",
    "kl_divergence",
    "make_contenders",
    "make_tasks",
    "markdown",
    "negative_log_likelihood",
    "open_results",
    "print_table",
    "read_text",
    "top1_agreement",
]
