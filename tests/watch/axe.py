"""axe-core, which finds what keeps people out of a page.

Version 4.14.1 by Deque Systems, under the Mozilla Public License 2.0: `axe.min.js` of the package, packed.
"""

from __future__ import annotations

import gzip
from pathlib import Path

from watch.browser import Tab

_SCRIPT = Path(__file__).with_name("axe-core-4.14.1.min.js.gz")
_FAULTS = """axe.run(document).then((it) => it.violations.map(
    (each) => `${each.impact} ${each.id}: ${each.nodes.map((node) => node.html).join(" ").slice(0, 500)}`))"""


def faults(tab: Tab) -> list[str]:
    """Returns what axe finds on the page that is open: how serious, which rule, and where."""
    # Past the page's content rules, which let no other script in.
    tab.call("Runtime.evaluate", expression=f"{gzip.decompress(_SCRIPT.read_bytes()).decode()};0")
    found = tab.value(_FAULTS)
    assert isinstance(found, list)
    return found
