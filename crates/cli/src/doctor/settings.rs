//! What the environment says, and what of it has no effect.

use std::env;
use std::ffi::OsString;

use serde::Serialize;
use tensorferry::{Config, Notice};

use super::gpus::Setting;

#[derive(Debug, Serialize)]
pub(super) struct Settings {
    /// The variables of this process that an engine looks at, by name.
    pub(super) environment: Vec<Setting>,
    /// Those whose value could not be understood.
    pub(super) warnings: Vec<String>,
    /// Those that are accepted without effect.
    pub(super) without_effect: Vec<String>,
}

const SECRETS: [&str; 5] = ["PASS", "SECRET", "TOKEN", "KEY", "CREDENTIAL"];

impl Settings {
    pub(super) fn look(config: &Config) -> Self {
        let mut environment: Vec<Setting> = env::vars_os()
            .filter_map(|(name, value)| {
                let name = name.into_string().ok()?;
                let looked_at = name.starts_with("TENSORFERRY_") || name.starts_with("MC_");
                looked_at.then(|| Setting { value: shown(&name, value), name })
            })
            .collect();
        environment.sort_by(|a, b| a.name.cmp(&b.name));
        let (mut warnings, mut without_effect) = (Vec::new(), Vec::new());
        for notice in &config.notices {
            match notice {
                Notice::Warning(text) => warnings.push(text.clone()),
                Notice::Debug(text) => without_effect.push(text.clone()),
                // A kind that is not known here: better told than not.
                other => warnings.push(format!("{other:?}")),
            }
        }
        Self { environment, warnings, without_effect }
    }
}

/// Reports are shown to others, and the peer's variables include passwords.
fn shown(name: &str, value: OsString) -> String {
    match SECRETS.iter().any(|part| name.contains(part)) {
        true => "(not shown)".to_owned(),
        false => value.to_string_lossy().into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_shown() {
        assert_eq!(shown("MC_REDIS_PASSWORD", "hunter2".into()), "(not shown)");
        assert_eq!(shown("TENSORFERRY_PORTS", "1-2".into()), "1-2");
    }
}
