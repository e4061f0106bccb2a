//! A user's own program in C, linked against the simulator as it would be against the vendor's.

use std::process::Command;

use crate::gpu::Folder;

/// Compiles `source` against the libraries in `folder`, ready to run with them. None: no compiler.
pub(crate) fn compile(folder: &Folder, source: &str, libraries: &[&str]) -> Option<Command> {
    let (c, program) = (folder.path().join("program.c"), folder.path().join("program"));
    std::fs::write(&c, source).unwrap();
    let mut cc = Command::new("cc");
    cc.arg("-Wall").arg("-Werror").arg("-o").arg(&program).arg(&c).arg("-L").arg(folder.path());
    libraries.iter().for_each(|library| {
        cc.arg(format!("-l:{library}"));
    });
    let made = match cc.output() {
        Ok(made) => made,
        Err(error) => {
            eprintln!("skipped: there is no C compiler: cc: {error}");
            return None;
        }
    };
    assert!(made.status.success(), "cc: {}", String::from_utf8_lossy(&made.stderr));
    let mut run = Command::new(program);
    run.env("LD_LIBRARY_PATH", folder.path());
    Some(run)
}

/// The program that docs/simgpu.md shows.
const EXAMPLE: &str = include_str!("../../../../docs/simgpu.md");

fn example() -> &'static str {
    let (_, rest) = EXAMPLE.split_once("```c\n").expect("the page shows a program in C");
    rest.split_once("```").expect("and ends it").0
}

#[test]
fn the_program_of_the_manual_works() {
    let folder = Folder::new();
    folder.install("libcudart.so.12");
    let Some(mut program) = compile(&folder, example(), &["libcudart.so.12"]) else { return };
    let ran = program.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{out}{err}");
    assert_eq!(out, "sent 1048576 bytes of device memory; pinned 65536 bytes, 1 context\n");
}

#[test]
fn the_environment_makes_it_fail() {
    let folder = Folder::new();
    folder.install("libcudart.so.12");
    let Some(mut program) = compile(&folder, example(), &["libcudart.so.12"]) else { return };
    let ran = program.env("SIMGPU_FAIL", "cudaHostAlloc:1:2").output().unwrap();
    let err = String::from_utf8_lossy(&ran.stderr);
    assert_eq!((ran.status.code(), &err[..]), (Some(1), "cudaHostAlloc: out of memory\n"));
    let ran = program.env("SIMGPU_FAIL", "nonsense").output().unwrap();
    let err = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(
        err,
        "simgpu: SIMGPU_FAIL=nonsense: expected CALL:N:CODE, N the call or *, at nonsense\n"
    );
}

#[test]
fn a_device_can_be_one_that_the_host_touches() {
    use std::os::unix::process::ExitStatusExt as _;
    let folder = Folder::new();
    folder.install("libamdhip64.so.6");
    let source = "
        #include <stddef.h>
        int hipMalloc(void **out, size_t len);
        int main(void) { void *p; if (hipMalloc(&p, 4096)) return 1; return ((char *)p)[9] = 7; }
    ";
    let Some(mut program) = compile(&folder, source, &["libamdhip64.so.6"]) else { return };
    assert_eq!(program.status().unwrap().signal(), Some(libc::SIGSEGV));
    assert_eq!(program.env("SIMGPU_ACCESS", "host").status().unwrap().code(), Some(7));
}
