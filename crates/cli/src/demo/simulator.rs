//! Simulated GPUs for both processes: copies of the simulator's library under vendors' names.

use std::collections::hash_map::RandomState;
use std::env;
use std::fs::{self, DirBuilder};
use std::hash::{BuildHasher, Hasher};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use tensorferry::Config;
use tensorferry::gpu::Vendor;

/// The copies; their folder is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Simulator {
    folder: PathBuf,
    files: Vec<(Vendor, PathBuf)>,
}

/// The variable that says where the library is.
const SIMULATOR: &str = "TENSORFERRY_SIMULATOR";
/// What Cargo calls the library.
const LIBRARY: &str = "libtensorferry_simgpu.so";
/// A function that every version of it has, and no vendor's library.
const MARK: &[u8] = b"simgpu_counters";

impl Simulator {
    /// Copies `library`, or the one that is found, for each of `vendors`.
    ///
    /// # Errors
    /// There is none, it is another library, or the copies cannot be written.
    pub(crate) fn install(
        library: Option<&Path>,
        vendors: impl Iterator<Item = Vendor>,
    ) -> Result<Self> {
        let library = find(library)?;
        let content =
            fs::read(&library).with_context(|| format!("{} cannot be read", library.display()))?;
        ensure!(
            content.windows(MARK.len()).any(|part| part == MARK),
            "{} is not the library of the simulator; docs/simgpu.md says where to get it",
            library.display()
        );
        let mut this = Self { folder: new_folder()?, files: Vec::new() };
        for vendor in vendors {
            if this.files.iter().any(|(known, _)| *known == vendor) {
                continue;
            }
            let file = this.folder.join(real_name(vendor)?);
            fs::write(&file, &content)
                .with_context(|| format!("{} cannot be written", file.display()))?;
            this.files.push((vendor, file));
        }
        Ok(this)
    }

    /// Has engines with these settings take the copies.
    pub(crate) fn choose(&self, config: &mut Config) {
        for (vendor, file) in &self.files {
            config.gpu = std::mem::take(&mut config.gpu).with_library(*vendor, file);
        }
    }

    /// The same, as variables for another process.
    pub(crate) fn variables(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        self.files.iter().map(|(vendor, file)| (vendor.library_setting(), file.as_path()))
    }
}

impl Drop for Simulator {
    fn drop(&mut self) {
        // Whoever has mapped a copy keeps it. A folder that stays is no reason to fail.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn find(chosen: Option<&Path>) -> Result<PathBuf> {
    let named = chosen.map(Path::to_owned).or_else(|| env::var_os(SIMULATOR).map(PathBuf::from));
    if let Some(path) = named {
        return Ok(path);
    }
    let program = env::current_exe().context("the path of this program cannot be found out")?;
    let beside = program.with_file_name(LIBRARY);
    ensure!(
        beside.exists(),
        "the library of the simulator is not at {}; name it: --simulate LIBRARY, or {SIMULATOR}; \
         `cargo build --release` in a clone of tensorferry leaves it in target/release",
        beside.display()
    );
    Ok(beside)
}

/// By its file name, a copy knows what it is to be.
fn real_name(vendor: Vendor) -> Result<&'static str> {
    Ok(match vendor {
        Vendor::Cuda => "libcuda.so.1",
        Vendor::Musa => "libmusart.so.5",
        Vendor::Hip => "libamdhip64.so.6",
        other => bail!("no library of {other} is simulated; use cuda, musa or hip"),
    })
}

/// A folder that only this user can write to, since libraries are loaded from it.
fn new_folder() -> Result<PathBuf> {
    let unique = RandomState::new().build_hasher().finish();
    let folder = env::temp_dir().join(format!("tensorferry-simulator-{unique:016x}"));
    DirBuilder::new()
        .mode(0o700)
        .create(&folder)
        .with_context(|| format!("no folder can be made at {}", folder.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with the simulator's mark.
    fn library(folder: &Path) -> PathBuf {
        let file = folder.join("any.so");
        fs::write(&file, [b"....", MARK, b"...."].concat()).unwrap();
        file
    }

    #[test]
    fn each_vendor_has_one_copy_while_it_lasts() {
        let folder = new_folder().unwrap();
        let library = library(&folder);
        let vendors = [Vendor::Hip, Vendor::Cuda, Vendor::Hip];
        let simulator = Simulator::install(Some(&library), vendors.into_iter()).unwrap();
        let names: Vec<&str> = simulator.variables().map(|(name, _)| name).collect();
        assert_eq!(names, ["TENSORFERRY_HIP_LIBRARY", "TENSORFERRY_CUDA_LIBRARY"]);
        let mut config = Config::default();
        simulator.choose(&mut config);
        let copy = config.gpu.cuda_library.unwrap();
        assert!(copy.ends_with("libcuda.so.1") && copy.exists());
        assert_eq!(config.gpu.musa_library, None);
        drop(simulator);
        assert!(!copy.exists() && !copy.parent().unwrap().exists());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn another_library_is_not_taken_for_it() {
        let folder = new_folder().unwrap();
        let file = folder.join("libcuda.so.1");
        fs::write(&file, "cuInit").unwrap();
        let install = |path: &Path| Simulator::install(Some(path), [Vendor::Cuda].into_iter());
        let text = crate::chain(&install(&file).unwrap_err());
        assert!(text.contains("libcuda.so.1 is not the library of the simulator; docs"), "{text}");
        let text = crate::chain(&install(&folder.join("none.so")).unwrap_err());
        assert!(text.contains("none.so cannot be read: No such file"), "{text}");
        fs::remove_dir_all(folder).unwrap();
    }
}
