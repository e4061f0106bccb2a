//! What became of each vendor's library, and the devices that it shows.

use std::time::Duration;

use serde::Serialize;
use tensorferry::gpu::{self, Choice, DeviceInfo, Examined, Settings, State};

/// All vendors, in the order in which they are asked.
#[derive(Debug, Serialize)]
pub(super) struct Gpus {
    /// The value of `TENSORFERRY_GPU`.
    choice: String,
    pub(super) vendors: Vec<Vendor>,
}

/// One vendor. What is not known is null or empty.
#[derive(Debug, Serialize)]
pub(super) struct Vendor {
    pub(super) vendor: &'static str,
    /// One word for what was found; the same words in every version.
    pub(super) state: &'static str,
    /// Whether there is a device that can be used.
    pub(super) usable: bool,
    /// What was found and, where that is not enough, what to do.
    pub(super) text: String,
    /// Settings that made it so.
    pub(super) settings: Vec<Setting>,
    pub(super) tried: Vec<Tried>,
    file: Option<String>,
    api: Option<String>,
    pub(super) driver_version: Option<String>,
    pub(super) runtime_version: Option<String>,
    failure: Option<Failure>,
    missing_function: Option<String>,
    pub(super) absent_functions: Vec<String>,
    pub(super) devices: Vec<Device>,
    #[serde(skip)]
    pub(super) of: gpu::Vendor,
    /// It has not answered, and whoever asks it hangs.
    #[serde(skip)]
    hangs: bool,
}

/// A setting that is not at its default.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Setting {
    pub(super) name: String,
    pub(super) value: String,
}

/// A file that was looked for, and what came of it.
#[derive(Debug, Serialize)]
pub(super) struct Tried {
    pub(super) name: String,
    pub(super) answer: String,
    /// There is such a file.
    found: bool,
}

/// What the library said when it refused.
#[derive(Debug, Serialize)]
struct Failure {
    call: String,
    code: i32,
    name: String,
    text: String,
}

/// One device, as this process numbers it.
#[derive(Debug, Serialize)]
pub(super) struct Device {
    pub(super) device: String,
    ordinal: u32,
    pub(super) name: Option<String>,
    pub(super) memory_bytes: Option<u64>,
    pub(super) pci_address: Option<String>,
    pub(super) uuid: Option<String>,
    /// It uses the host's memory.
    pub(super) integrated: bool,
    #[serde(skip)]
    pub(super) id: gpu::DeviceId,
}

impl Gpus {
    /// What is found of each vendor within `patience`.
    pub(super) fn look(settings: &Settings, patience: Duration) -> Self {
        let one = |vendor| Vendor::new(vendor, &gpu::examine(settings, vendor, patience), settings);
        Self {
            choice: settings.choice.to_string(),
            vendors: gpu::Vendor::ALL.into_iter().map(one).collect(),
        }
    }

    /// Whether a library does not answer.
    pub(super) fn hang(&self) -> bool {
        self.vendors.iter().any(|vendor| vendor.hangs)
    }

    /// Whether one is still being opened: until that ends, no thread of this process gets past the loader to begin.
    pub(super) fn is_opening(&self) -> bool {
        self.vendors.iter().any(|vendor| vendor.hangs && vendor.file.is_none())
    }

    /// All devices that can be used.
    pub(super) fn devices(&self) -> impl Iterator<Item = &Device> {
        self.vendors.iter().flat_map(|vendor| &vendor.devices)
    }
}

impl Vendor {
    fn new(vendor: gpu::Vendor, examined: &Examined, settings: &Settings) -> Self {
        let state = &examined.state;
        let found = state.ready();
        let (api, versions) = interface(state).unzip();
        let version = |of: fn(gpu::Versions) -> Option<gpu::Version>| {
            versions.and_then(of).map(|version| version.to_string())
        };
        let devices: Vec<Device> =
            found.iter().flat_map(|found| &found.devices).map(Device::new).collect();
        Self {
            vendor: vendor.name(),
            state: state.word(),
            usable: !devices.is_empty(),
            text: state.to_string(),
            settings: forcing(vendor, settings),
            tried: examined.tried.iter().map(Tried::new).collect(),
            file: state.file().map(|file| file.display().to_string()),
            api: api.map(|api| api.to_string()),
            driver_version: version(|versions| versions.driver),
            runtime_version: version(|versions| versions.runtime),
            failure: state.failure().map(Failure::new),
            missing_function: missing_function(state),
            absent_functions: found.map(|found| found.absent.clone()).unwrap_or_default(),
            devices,
            of: vendor,
            hangs: matches!(state, State::NoAnswer { .. }),
        }
    }
}

/// The settings that decided where this vendor was looked for.
fn forcing(vendor: gpu::Vendor, settings: &Settings) -> Vec<Setting> {
    let choice = (settings.choice != Choice::Auto)
        .then(|| Setting { name: "TENSORFERRY_GPU".into(), value: settings.choice.to_string() });
    let library = settings.library(vendor).map(|file| Setting {
        name: vendor.library_setting().into(),
        value: file.display().to_string(),
    });
    choice.into_iter().chain(library).collect()
}

/// How the library is spoken to, where one was opened, and its versions, where it told them.
fn interface(state: &State) -> Option<(gpu::Api, gpu::Versions)> {
    match state {
        State::Mapped { api, .. } => Some((*api, gpu::Versions::default())),
        State::NoDriver { api, versions, .. }
        | State::DriverTooOld { api, versions, .. }
        | State::NoDevice { api, versions, .. }
        | State::InitFailed { api, versions, .. } => Some((*api, *versions)),
        State::Ready(found) => Some((found.api, found.versions)),
        _ => None,
    }
}

fn missing_function(state: &State) -> Option<String> {
    match state {
        State::Unusable { missing, .. } => missing.clone(),
        _ => None,
    }
}

impl Tried {
    fn new(tried: &gpu::Tried) -> Self {
        Self {
            name: tried.name.display().to_string(),
            answer: tried.answer.clone(),
            found: tried.found,
        }
    }
}

impl Failure {
    fn new(failure: &gpu::Failure) -> Self {
        Self {
            call: failure.call.clone(),
            code: failure.code,
            name: failure.name.clone(),
            text: failure.text.clone(),
        }
    }
}

impl Device {
    fn new(info: &DeviceInfo) -> Self {
        Self {
            device: info.id.to_string(),
            ordinal: info.id.ordinal,
            name: info.name.clone(),
            memory_bytes: info.memory_bytes,
            pci_address: info.pci_address.clone(),
            uuid: info.uuid.map(uuid_text),
            integrated: info.integrated,
            id: info.id,
        }
    }
}

/// As vendors' tools print it, without what each of them puts before it.
fn uuid_text(uuid: [u8; 16]) -> String {
    let mut text = String::new();
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn examined(state: State, tried: Vec<gpu::Tried>) -> Vendor {
        Vendor::new(gpu::Vendor::Cuda, &Examined { state, tried }, &Settings::default())
    }

    #[test]
    fn a_missing_library_tells_each_file_and_answer() {
        let tried = ["a.so.1", "b.so"].map(|name| gpu::Tried {
            name: name.into(),
            answer: format!("{name}: no"),
            found: false,
        });
        let tried = tried.to_vec();
        let missing = State::Missing { vendor: gpu::Vendor::Cuda, tried: tried.clone() };
        let vendor = examined(missing, tried);
        assert_eq!((vendor.state, vendor.usable, vendor.tried.len()), ("missing", false, 2));
        assert_eq!(vendor.tried[1].answer, "b.so: no");
        assert!(vendor.text.contains("TENSORFERRY_CUDA_LIBRARY"), "{}", vendor.text);
        assert_eq!((vendor.file, vendor.api), (None, None));
    }

    #[test]
    fn a_function_that_is_not_there_is_named() {
        let unusable = State::Unusable {
            vendor: gpu::Vendor::Cuda,
            file: "x.so".into(),
            why: "it lacks the function cuInit".into(),
            missing: Some("cuInit".into()),
        };
        let vendor = examined(unusable, Vec::new());
        assert_eq!(vendor.missing_function.as_deref(), Some("cuInit"));
        assert_eq!(vendor.file.as_deref(), Some("x.so"));
    }

    #[test]
    fn only_settings_that_are_not_the_default_are_told() {
        let settings = Settings::default()
            .with_choice(Choice::Only(gpu::Vendor::Hip))
            .with_library(gpu::Vendor::Hip, "h.so");
        let told = |vendor| -> Vec<(String, String)> {
            let all = forcing(vendor, &settings).into_iter();
            all.map(|setting| (setting.name, setting.value)).collect()
        };
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(told(gpu::Vendor::Cuda), [pair("TENSORFERRY_GPU", "hip")]);
        assert_eq!(
            told(gpu::Vendor::Hip),
            [pair("TENSORFERRY_GPU", "hip"), pair("TENSORFERRY_HIP_LIBRARY", "h.so")]
        );
        assert!(forcing(gpu::Vendor::Hip, &Settings::default()).is_empty());
    }

    #[test]
    fn a_uuid_is_written_in_groups() {
        let uuid = std::array::from_fn(|at| at as u8);
        assert_eq!(uuid_text(uuid), "00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
