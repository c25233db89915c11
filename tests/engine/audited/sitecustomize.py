"""Every process that has this folder on its path writes down what runs code that came as bytes (PEP 578).

An `import` statement runs code, too; its module's name is in the source, so it is left out, as is all that the module
does while it is imported. `importlib.import_module` is not: a name may come from anywhere.
"""

import json
import os
import sys

_WATCHED = {"pickle.find_class", "marshal.loads", "exec", "compile", "import", "code.__new__", "function.__new__"}
_FOLDER = os.environ.get("HEADRACE_AUDIT")
_busy = False


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    global _busy
    if event not in _WATCHED or _busy:
        return
    _busy = True
    try:
        frames, frame = [], sys._getframe().f_back
        while frame is not None:
            frames.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
            frame = frame.f_back
        if event == "import":
            callers = [each for each in frames if "<frozen importlib" not in each]
            if not callers or not callers[0].endswith("importlib/__init__.py:import_module"):
                return
            frames = callers
        elif any("<frozen importlib" in each for each in frames):
            return
        line = {"event": event, "about": repr(arguments)[:200], "frames": frames[:40], "argv": sys.argv[:2]}
        descriptor = os.open(f"{_FOLDER}/{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        os.close(descriptor)
    finally:
        _busy = False


if _FOLDER:
    sys.addaudithook(_watch)
