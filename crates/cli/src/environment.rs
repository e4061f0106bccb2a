//! The variables of this process, as the program's settings.

use tensorferry::{Config, ConfigError};

/// Where the library of the simulator is: a variable of the program, which engines do not know.
pub(crate) const SIMULATOR: &str = "TENSORFERRY_SIMULATOR";

/// The engine's settings.
///
/// # Errors
/// One of them is malformed.
pub(crate) fn config() -> Result<Config, ConfigError> {
    let vars = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok()?;
        (name != SIMULATOR).then(|| (name, value.to_string_lossy().into_owned()))
    });
    Config::from_vars(vars)
}
