"""A kernel that is launched many times."""

from __future__ import annotations

WAVE = object()  # where the number of the wave goes among the arguments of `Repeated`


class Repeated:
    """A kernel of a one-dimensional grid that is launched wave by wave (or piece by piece) with the same arguments.

    From the second launch on it is the compiled kernel that gets them, without Triton's look at each of thirty. The
    wave must be an argument that is not specialized.
    """

    def __init__(self, kernel, grid: int, *arguments: object, **options: object) -> None:
        self.kernel, self.grid, self.arguments, self.options = kernel, grid, list(arguments), options
        self.wave_at = next(i for i, argument in enumerate(arguments) if argument is WAVE)
        self.compiled = None

    def __call__(self, wave: int) -> None:
        """Launch it for a wave."""
        self.arguments[self.wave_at] = wave
        if self.compiled is not None:
            self.compiled(*self.arguments)
            return
        compiled = self.kernel[self.grid,](*self.arguments, **self.options)
        if compiled is not None:  # the interpreter compiles nothing
            compiled = compiled.result() if hasattr(compiled, "result") else compiled  # of Triton's AsyncCompileMode
            self.compiled = compiled[self.grid, 1, 1]
            self.arguments += [self.options[name] for name in self.kernel.arg_names[len(self.arguments) :]]
