"""Value classes that cost next to nothing to define: ``dataclass`` without the compiler.

The standard library's ``dataclasses`` writes source text for each class and compiles
it, and imports ``inspect`` to do so. For the classes that an owner, its sidecar and its
launcher need before the first worker that was two thirds of the time to start a pool.
This one fills in generic methods instead. Type checkers see the real thing.

Supported: ``frozen``, ``order``, defaults, ``field(default_factory=...)``, keyword
arguments, ``replace``. Not supported, with an error at once: everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass, field, replace
else:

    class _Factory:
        def __init__(self, make):
            self.make = make

    def field(*, default_factory):
        """A default that is made anew for each object."""
        return _Factory(default_factory)

    def replace(value, /, **changes):
        """A copy of ``value`` with some fields changed."""
        for name in value.__dataclass_names__:
            if name not in changes:
                changes[name] = getattr(value, name)
        return type(value)(**changes)

    def dataclass(cls=None, /, *, frozen=False, order=False):
        """Give a class of annotated names its constructor, equality and repr."""
        if cls is None:
            return lambda real: _equip(real, frozen=frozen, order=order)
        return _equip(cls, frozen=frozen, order=order)

    def _equip(cls, *, frozen, order):
        names = tuple(cls.__annotations__)
        defaults = {name: vars(cls)[name] for name in names if name in vars(cls)}
        for name in names:
            if isinstance(defaults.get(name), _Factory):
                delattr(cls, name)
        cls.__dataclass_names__ = cls.__match_args__ = names
        cls.__dataclass_defaults__ = defaults
        cls.__dataclass_checks__ = hasattr(cls, "__post_init__")
        cls.__init__ = _init
        cls.__eq__ = _eq
        cls.__repr__ = _repr
        cls.__hash__ = _hash if frozen else None
        if frozen:
            cls.__setattr__ = cls.__delattr__ = _refuse
        if order:
            cls.__lt__, cls.__le__, cls.__gt__, cls.__ge__ = _lt, _le, _gt, _ge
        return cls

    def _init(self, *args, **kwargs):
        cls = type(self)
        names = cls.__dataclass_names__
        state = dict(zip(names, args))  # noqa: B905 - the lengths are compared below
        if len(args) == len(names) and not kwargs:
            # Rows of processes, by the thousand: their makers name every value.
            self.__dict__.update(state)
            if cls.__dataclass_checks__:
                self.__post_init__()
            return
        if len(args) + len(kwargs) < len(names):
            for name, default in cls.__dataclass_defaults__.items():
                if name not in state and name not in kwargs:
                    state[name] = default.make() if type(default) is _Factory else default
        if kwargs:
            twice = state.keys() & kwargs.keys()
            if twice:
                raise TypeError(f"{cls.__name__} got {', '.join(twice)} twice")
            state.update(kwargs)
        if len(state) != len(names) or len(args) > len(names):
            _complain(cls, names, args, kwargs, state)
        self.__dict__.update(state)
        if cls.__dataclass_checks__:
            self.__post_init__()

    def _complain(cls, names, args, kwargs, state):
        if len(args) > len(names):
            raise TypeError(f"{cls.__name__} takes {len(names)} values, not {len(args)}")
        wrong = [name for name in kwargs if name not in names]
        if wrong:
            raise TypeError(f"{cls.__name__} has no {', '.join(wrong)}")
        missing = [name for name in names if name not in state]
        raise TypeError(f"{cls.__name__} needs {', '.join(missing)}")

    def _values(self):
        state = self.__dict__
        return tuple([state[name] for name in type(self).__dataclass_names__])

    def _eq(self, other):
        if type(other) is not type(self):
            return NotImplemented
        return self.__dict__ == other.__dict__

    def _hash(self):
        return hash(_values(self))

    def _repr(self):
        pairs = zip(type(self).__dataclass_names__, _values(self), strict=True)
        return f"{type(self).__qualname__}({', '.join(f'{n}={v!r}' for n, v in pairs)})"

    def _refuse(self, name, *_):
        raise AttributeError(f"{type(self).__name__} is frozen: {name!r} cannot be changed")

    def _compare(operation):
        def method(self, other):
            if type(other) is not type(self):
                return NotImplemented
            return operation(_values(self), _values(other))

        return method

    _lt = _compare(tuple.__lt__)
    _le = _compare(tuple.__le__)
    _gt = _compare(tuple.__gt__)
    _ge = _compare(tuple.__ge__)


__all__ = ["dataclass", "field", "replace"]
