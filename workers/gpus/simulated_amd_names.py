"""The enumerations and exceptions of AMD's binding, as the simulated one offers them."""

from enum import IntEnum


class AmdSmiInitFlags(IntEnum):
    INIT_AMD_CPUS = 1
    INIT_AMD_GPUS = 2


class AmdSmiClkType(IntEnum):
    SYS = 0
    GFX = 0
    DF = 1
    DCEF = 2
    SOC = 3
    MEM = 4
    PCIE = 5


class AmdSmiTemperatureType(IntEnum):
    EDGE = 0
    HOTSPOT = 1
    JUNCTION = 1
    VRAM = 2
    PLX = 7


class AmdSmiTemperatureMetric(IntEnum):
    CURRENT = 0
    MAX = 1
    MIN = 2
    CRITICAL = 5
    EMERGENCY = 7


class AmdSmiMemoryType(IntEnum):
    VRAM = 0
    VIS_VRAM = 1
    GTT = 2


class AmdSmiLinkType(IntEnum):
    AMDSMI_LINK_TYPE_INTERNAL = 0
    AMDSMI_LINK_TYPE_PCIE = 1
    AMDSMI_LINK_TYPE_XGMI = 2
    AMDSMI_LINK_TYPE_NOT_APPLICABLE = 3
    AMDSMI_LINK_TYPE_UNKNOWN = 4


class AmdSmiVirtualizationMode(IntEnum):
    UNKNOWN = 0
    BAREMETAL = 1
    HOST = 2
    GUEST = 3
    PASSTHROUGH = 4


class AmdSmiAffinityScope(IntEnum):
    NUMA_SCOPE = 0
    SOCKET_SCOPE = 1


class AmdSmiException(Exception):
    pass


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, err_code: int) -> None:
        super().__init__(abs(err_code))
        self.err_code = abs(err_code)

    def __str__(self) -> str:
        return f"Error code:\n\t{self.err_code} | simulated error"


class AmdSmiRetryException(AmdSmiLibraryException):
    def __init__(self) -> None:
        super().__init__(9)


class AmdSmiTimeoutException(AmdSmiLibraryException):
    def __init__(self) -> None:
        super().__init__(8)


class AmdSmiParameterException(AmdSmiException):
    """The only one without a code."""

    def __init__(self, received: object, expected: type) -> None:
        super().__init__(f"Invalid parameter:\nActual type: {type(received)}\nExpected type: {expected}")
        self.err_code = None


def library_exception(code: int) -> AmdSmiLibraryException:
    own: dict[int, type[AmdSmiRetryException] | type[AmdSmiTimeoutException]] = {
        8: AmdSmiTimeoutException, 9: AmdSmiRetryException}
    return own[code]() if code in own else AmdSmiLibraryException(code)


NAMES = {kind.__name__: kind for kind in (
    AmdSmiInitFlags, AmdSmiClkType, AmdSmiTemperatureType, AmdSmiTemperatureMetric, AmdSmiMemoryType, AmdSmiLinkType,
    AmdSmiVirtualizationMode, AmdSmiAffinityScope, AmdSmiException, AmdSmiLibraryException, AmdSmiRetryException,
    AmdSmiTimeoutException, AmdSmiParameterException)}
