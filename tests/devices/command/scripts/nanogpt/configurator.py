"""
Overrides the globals of the script that exec()s this file, from the command line:

$ python train.py config/tiny.py --batch_size=32

runs config/tiny.py first, and then sets batch_size to 32. Not pretty, but there is no `config.` in front of every name.
"""
import sys
from ast import literal_eval

for arg in sys.argv[1:]:
    if '=' not in arg:
        # a config file
        assert not arg.startswith('--'), f"expected --key=value, got {arg}"
        print(f"config from {arg}:")
        with open(arg) as f:
            print(f.read())
        exec(open(arg).read())
    else:
        # --key=value
        assert arg.startswith('--')
        key, val = arg[2:].split('=', 1)
        if key not in globals():
            raise ValueError(f"Unknown config key: {key}")
        try:
            value = literal_eval(val)
        except (SyntaxError, ValueError):
            value = val  # a plain string
        assert type(value) == type(globals()[key]), f"{key} is a {type(globals()[key])}"
        print(f"override: {key} = {value}")
        globals()[key] = value
