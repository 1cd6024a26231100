"""What is wrong with a container or a stream, one exception for each kind of damage."""


class ContainerError(ValueError):
    """Bytes that are no container, or a damaged one. All others below are kinds of it."""


class MagicError(ContainerError):
    """They do not begin as a container does."""


class VersionError(ContainerError):
    """Written by a version, or with a codec, that this one does not read."""


class TruncatedError(ContainerError):
    """Shorter, or longer, than the header says."""


class HeaderChecksumError(ContainerError):
    """The header's CRC-32 is another."""


class HeaderError(ContainerError):
    """A field of the header has a value that no writer gives it."""


class ShapeError(ContainerError):
    """Shape and number of elements do not belong together, or are too large."""


class SectionError(ContainerError):
    """A section is missing, twice there, out of bounds, overlapping, not aligned, or of another length."""


class SectionChecksumError(ContainerError):
    """The CRC-32 of a section is another."""


class CodebookError(ContainerError):
    """Code lengths that no prefix code has, or exponents that stand twice in the palette."""


class DirectoryError(ContainerError):
    """The directory of the blocks, or the sizes of their lanes, do not add up."""


class PatchError(ContainerError):
    """Patches out of order, or outside of their block."""


class StreamError(ContainerError):
    """While decoding: a lane's stream does not end where it should."""


class BlockSumError(ContainerError):
    """What was decoded has another sum than what was encoded."""
