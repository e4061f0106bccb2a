//! Which vendor's library a file pretends to be, by its name.

/// What a copy of the simulator pretends to be.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Variant {
    /// `libcuda.so.1`
    CudaDriver,
    /// `libcudart.so.11.0`, answering 11.8: 24-byte attributes.
    CudaRuntime11,
    /// `libcudart.so.12`, answering 12.9: 24-byte attributes.
    CudaRuntime12,
    /// `libcudart.so.13`, answering 13.0: 88-byte attributes.
    CudaRuntime13,
    /// `libmusa.so.1`
    MusaDriver,
    /// `libmusart.so.4`: 24-byte attributes, an unknown pointer is an error.
    MusaRuntime4,
    /// `libmusart.so.5`: 88-byte attributes.
    MusaRuntime5,
    /// `libamdhip64.so.5`, answering 5.2.3: old numbers of the memory types.
    Hip5,
    /// `libamdhip64.so.6`, answering 6.4.3.
    Hip6,
    /// `libamdhip64.so.7`, answering 7.1.
    Hip7,
}

/// The files that `install` makes when it is not told which.
pub const FILE_NAMES: [&str; 15] = [
    "libcuda.so.1",
    "libcudart.so",
    "libcudart.so.11.0",
    "libcudart.so.12",
    "libcudart.so.13",
    "libmusa.so.1",
    "libmusart.so",
    "libmusart.so.4",
    "libmusart.so.5",
    "libmusa_runtime.so",
    "libamdhip64.so",
    "libamdhip64.so.5",
    "libamdhip64.so.6",
    "libamdhip64.so.7",
    "libmusa.so",
];

/// Who made the (simulated) device. Libraries of one family in one folder share their state.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Family {
    Cuda,
    Musa,
    Hip,
}

impl Variant {
    /// Every variant, once.
    pub const ALL: [Self; 10] = [
        Self::CudaDriver,
        Self::CudaRuntime11,
        Self::CudaRuntime12,
        Self::CudaRuntime13,
        Self::MusaDriver,
        Self::MusaRuntime4,
        Self::MusaRuntime5,
        Self::Hip5,
        Self::Hip6,
        Self::Hip7,
    ];

    /// The variant that a file of this name (without its folder) is, if it is a name of a vendor.
    #[must_use]
    pub fn of_file(name: &str) -> Option<Self> {
        let (stem, version) = name.split_once(".so")?;
        let version = version.trim_start_matches('.');
        let major = version.split('.').next().unwrap_or_default();
        Some(match (stem, major) {
            ("libcuda", _) => Self::CudaDriver,
            ("libcudart", "11") => Self::CudaRuntime11,
            ("libcudart", "12") => Self::CudaRuntime12,
            ("libcudart", "13" | "") => Self::CudaRuntime13,
            ("libmusa", _) => Self::MusaDriver,
            ("libmusart", "4" | "1") | ("libmusa_runtime", _) => Self::MusaRuntime4,
            ("libmusart", "5" | "") => Self::MusaRuntime5,
            ("libamdhip64", "5") => Self::Hip5,
            ("libamdhip64", "6") => Self::Hip6,
            ("libamdhip64", "7" | "") => Self::Hip7,
            _ => return None,
        })
    }

    /// The name that the real library has inside, which is also its usual file name.
    #[must_use]
    pub fn soname(self) -> &'static str {
        match self {
            Self::CudaDriver => "libcuda.so.1",
            Self::CudaRuntime11 => "libcudart.so.11.0",
            Self::CudaRuntime12 => "libcudart.so.12",
            Self::CudaRuntime13 => "libcudart.so.13",
            Self::MusaDriver => "libmusa.so.1",
            Self::MusaRuntime4 => "libmusart.so.4",
            Self::MusaRuntime5 => "libmusart.so.5",
            Self::Hip5 => "libamdhip64.so.5",
            Self::Hip6 => "libamdhip64.so.6",
            Self::Hip7 => "libamdhip64.so.7",
        }
    }

    /// How many bytes the runtime writes for one pointer; 0 for a driver, which has no such struct.
    #[must_use]
    pub fn attribute_bytes(self) -> usize {
        match self {
            Self::CudaDriver | Self::MusaDriver => 0,
            Self::CudaRuntime11 | Self::CudaRuntime12 | Self::MusaRuntime4 => 24,
            Self::CudaRuntime13 | Self::MusaRuntime5 => 88,
            Self::Hip5 | Self::Hip6 | Self::Hip7 => 32,
        }
    }

    /// The number that the library gives as its own version.
    #[must_use]
    pub fn version(self) -> i32 {
        match self {
            Self::CudaDriver | Self::CudaRuntime13 => 13_000,
            Self::CudaRuntime11 => 11_080,
            Self::CudaRuntime12 => 12_090,
            Self::MusaRuntime4 => 40_300,
            Self::MusaDriver | Self::MusaRuntime5 => 50_000,
            Self::Hip5 => 50_221_153,
            Self::Hip6 => 60_443_484,
            Self::Hip7 => 70_125_424,
        }
    }

    /// Whether the real library has a symbol of this name, so far as the simulator has it at all.
    #[must_use]
    pub fn exports(self, symbol: &str) -> bool {
        let driver =
            |short: &str, long: &str| symbol.starts_with(short) && !symbol.starts_with(long);
        let vendors = ["cu", "mu", "hip"].iter().any(|prefix| {
            symbol.strip_prefix(prefix).is_some_and(|rest| {
                rest.starts_with(|c: char| c.is_ascii_uppercase())
                    || rest.starts_with("da")
                    || rest.starts_with("sa")
            })
        });
        if !vendors {
            return true;
        }
        match self {
            Self::CudaDriver => driver("cu", "cuda"),
            Self::CudaRuntime11 | Self::CudaRuntime12 | Self::CudaRuntime13 => {
                symbol.starts_with("cuda")
            }
            Self::MusaDriver => driver("mu", "musa"),
            Self::MusaRuntime4 => {
                symbol.starts_with("musa") && symbol != "musaThreadExchangeStreamCaptureMode"
            }
            Self::MusaRuntime5 => symbol.starts_with("musa"),
            Self::Hip5 => {
                symbol.starts_with("hip")
                    && !["hipLaunchHostFunc", "hipExtGetLastError"].contains(&symbol)
            }
            Self::Hip6 | Self::Hip7 => symbol.starts_with("hip"),
        }
    }

    pub(crate) fn family(self) -> Family {
        match self {
            Self::CudaDriver | Self::CudaRuntime11 | Self::CudaRuntime12 | Self::CudaRuntime13 => {
                Family::Cuda
            }
            Self::MusaDriver | Self::MusaRuntime4 | Self::MusaRuntime5 => Family::Musa,
            Self::Hip5 | Self::Hip6 | Self::Hip7 => Family::Hip,
        }
    }

    /// The driver beside this runtime, which then holds the state of both.
    pub(crate) fn driver(self) -> Option<&'static str> {
        match self {
            Self::CudaRuntime11 | Self::CudaRuntime12 | Self::CudaRuntime13 => Some("libcuda.so.1"),
            Self::MusaRuntime4 | Self::MusaRuntime5 => Some("libmusa.so.1"),
            Self::CudaDriver | Self::MusaDriver | Self::Hip5 | Self::Hip6 | Self::Hip7 => None,
        }
    }
}
