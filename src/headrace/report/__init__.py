"""What the event files of a run say: summary, tables, one page, progress, TensorBoard. Reads files alone."""

from headrace.report.model.events import EventLog, Tail, read_events, read_log
from headrace.report.model.summary import References, Summary, summarize, verdict
from headrace.report.views.live import ProgressBar, TensorBoard
from headrace.report.views.page import write_page
from headrace.report.views.table import comparison_plain, comparison_table, run_plain, run_table

__all__ = [
    "EventLog",
    "ProgressBar",
    "References",
    "Summary",
    "Tail",
    "TensorBoard",
    "comparison_plain",
    "comparison_table",
    "read_events",
    "read_log",
    "run_plain",
    "run_table",
    "summarize",
    "verdict",
    "write_page",
]
