//! Kinds of memory: who can touch them, and what queries say of them.

use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;

use tensorferry_simgpu::{Memory, Variant};

use crate::gpu::{End, Gpu, address, in_child};

fn send(socket: &UnixStream, addr: u64, len: usize) -> std::io::Result<usize> {
    let at = std::ptr::with_exposed_provenance(addr as usize);
    // SAFETY: the kernel reads the memory and answers EFAULT where it cannot.
    let sent = unsafe { libc::send(socket.as_raw_fd(), at, len, 0) };
    usize::try_from(sent).map_err(|_| std::io::Error::last_os_error())
}

fn receive(socket: &UnixStream, addr: u64, len: usize) -> std::io::Result<usize> {
    let at = std::ptr::with_exposed_provenance_mut(addr as usize);
    // SAFETY: memory of the simulator's; the kernel answers EFAULT where it cannot write.
    let got = unsafe { libc::recv(socket.as_raw_fd(), at, len, 0) };
    usize::try_from(got).map_err(|_| std::io::Error::last_os_error())
}

fn touch(addr: u64) -> i32 {
    let at = std::ptr::with_exposed_provenance::<u8>(addr as usize);
    // SAFETY: in a child, which the signal ends if the host may not read there.
    i32::from(unsafe { at.read_volatile() })
}

#[test]
fn device_memory_is_out_of_reach_of_host_and_sockets() {
    let fault = |result: std::io::Result<usize>| result.unwrap_err().raw_os_error();
    for variant in Variant::ALL {
        let gpu = Gpu::new(variant);
        for memory in [Memory::Device, Memory::Mapped, Memory::Pool] {
            let addr = gpu.control.alloc(0, 65536, memory).unwrap();
            gpu.control.write(addr, &[7; 65536]).unwrap();
            let (near, mut far) = UnixStream::pair().unwrap();
            assert_eq!(fault(send(&near, addr + 5, 4096)), Some(libc::EFAULT), "{variant:?}");
            far.write_all(b"kept").unwrap();
            assert_eq!(fault(receive(&near, addr, 4)), Some(libc::EFAULT));
            let mut kept = [0; 4];
            (&near).read_exact(&mut kept).unwrap();
            assert_eq!(&kept, b"kept");
            assert_eq!(in_child(|| touch(addr)), End::Signal(libc::SIGSEGV));
        }
        for memory in [Memory::Managed, Memory::Pinned] {
            let addr = gpu.control.alloc(0, 65536, memory).unwrap();
            gpu.control.write(addr, &[7; 65536]).unwrap();
            let (near, mut far) = UnixStream::pair().unwrap();
            assert_eq!(send(&near, addr, 4096).unwrap(), 4096);
            let mut got = [0; 4096];
            far.read_exact(&mut got).unwrap();
            assert_eq!(got, [7; 4096]);
            assert_eq!(in_child(|| touch(addr)), End::Exit(7));
        }
    }
}

/// type, device, devicePointer, hostPointer, and isManaged where the struct has it.
type Told = (i32, i32, u64, u64, i32);

fn ask(gpu: &Gpu, addr: u64) -> Result<Told, i32> {
    let mut bytes = [0xa5u8; 256];
    let code = gpu.call("PointerGetAttributes", &[address(&mut bytes), addr]);
    let size = gpu.variant.attribute_bytes();
    if code != 0 {
        assert_eq!(bytes, [0xa5; 256], "nothing is written on failure");
        return Err(code);
    }
    assert_eq!(bytes[size..], [0xa5; 256][size..], "{:?} writes its own size", gpu.variant);
    assert!(bytes[32.min(size)..size].iter().all(|byte| *byte == 0), "reserved words are zero");
    let int = |at: usize| i32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let wide = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    Ok((int(0), int(4), wide(8), wide(16), if gpu.is_hip() { int(24) } else { 0 }))
}

#[test]
fn runtimes_tell_kinds_in_their_own_layout_and_numbers() {
    for variant in Variant::ALL.into_iter().filter(|variant| variant.attribute_bytes() > 0) {
        let gpu = Gpu::new(variant);
        let old = variant == Variant::Hip5;
        let (host, device, managed) = if old { (0, 1, 0) } else { (1, 2, 3) };
        let is_managed = i32::from(gpu.is_hip());
        for memory in [Memory::Device, Memory::Mapped, Memory::Pool] {
            let addr = gpu.control.alloc(1, 4 << 20, memory).unwrap();
            let inside = addr + (3 << 20) + 1;
            assert_eq!(ask(&gpu, inside), Ok((device, 1, inside, 0, 0)), "{variant:?} {memory:?}");
        }
        let addr = gpu.control.alloc(1, 4096, Memory::Managed).unwrap();
        assert_eq!(ask(&gpu, addr), Ok((managed, 1, addr, addr, is_managed)));
        let addr = gpu.control.alloc(1, 4096, Memory::Pinned).unwrap();
        assert_eq!(ask(&gpu, addr + 9), Ok((host, 1, addr + 9, addr + 9, 0)));

        let mut plain = [0u8; 64];
        let plain = address(&mut plain);
        if matches!(variant, Variant::Hip5 | Variant::MusaRuntime4) {
            assert_eq!(ask(&gpu, plain), Err(1));
            assert_eq!(gpu.call("PeekAtLastError", &[]), 1);
            assert_eq!((gpu.call("GetLastError", &[]), gpu.call("GetLastError", &[])), (1, 0));
        } else {
            assert_eq!(ask(&gpu, plain), Ok((0, -2, 0, plain, 0)));
        }
        // The query itself makes a context on device 0, except in HIP.
        assert_eq!(gpu.control.count("contexts.0"), u64::from(!gpu.is_hip()), "{variant:?}");
        assert!(gpu.control.count("pointer_queries") >= 6);
    }
}

fn attribute(gpu: &Gpu, which: u64, addr: u64) -> Result<u64, i32> {
    gpu.get("PointerGetAttribute", &[which, addr])
}

#[test]
fn drivers_tell_kinds_attribute_by_attribute() {
    for variant in [Variant::CudaDriver, Variant::MusaDriver] {
        let gpu = Gpu::new(variant);
        let kinds = [Memory::Device, Memory::Managed, Memory::Mapped, Memory::Pool, Memory::Pinned];
        let [plain, managed, mapped, pool, pinned] =
            kinds.map(|memory| gpu.control.alloc(1, 6 << 20, memory).unwrap());
        assert_eq!(gpu.call("Init", &[0]), 0);
        let context = attribute(&gpu, 1, plain).unwrap();
        assert_ne!(context, 0);
        for (addr, kind, expected) in [
            (plain, 2, context),
            (managed, 2, context),
            (mapped, 2, 0),
            (pool, 2, 0),
            (pinned, 1, context),
        ] {
            let inside = addr + (5 << 20);
            assert_eq!(attribute(&gpu, 2, inside), Ok(kind));
            assert_eq!(attribute(&gpu, 1, inside), Ok(expected));
            assert_eq!(attribute(&gpu, 9, inside), Ok(1));
            assert_eq!(attribute(&gpu, 8, inside), Ok(u64::from(addr == managed)));
            assert_eq!(attribute(&gpu, 17, inside).unwrap() != 0, addr == pool);
            assert_eq!(attribute(&gpu, 4, inside).is_ok(), addr == managed || addr == pinned);
        }
        assert_eq!(
            (attribute(&gpu, 11, plain + 9), attribute(&gpu, 12, plain)),
            (Ok(plain), Ok(6 << 20))
        );
        // A mapped range is far larger than what is mapped, in parts of 2 MiB.
        assert_eq!(attribute(&gpu, 11, mapped + (3 << 20)), Ok(mapped));
        assert!(attribute(&gpu, 12, mapped).unwrap() > 1 << 30);
        assert_eq!(attribute(&gpu, 19, mapped + (3 << 20)), Ok(mapped + (2 << 20)));
        assert_eq!(attribute(&gpu, 2, mapped + (6 << 20)), Err(1));
        let handle = gpu.get("MemRetainAllocationHandle", &[mapped]).unwrap();
        let mut properties = [0i32; 8];
        assert_eq!(
            gpu.call("MemGetAllocationPropertiesFromHandle", &[address(&mut properties), handle]),
            0
        );
        assert_eq!(properties[2..4], [1, 1]);
        assert_eq!(gpu.call("MemRelease", &[handle]), 0);
        assert_eq!(gpu.get("MemRetainAllocationHandle", &[plain]), Err(1));

        let mut host = [0u8; 64];
        let unknown = address(&mut host);
        assert_eq!(attribute(&gpu, 2, unknown), Err(1));
        let untouched = (7u64 << 32) | 7;
        let (mut kind, mut ordinal) = (untouched, untouched);
        let (mut which, mut outs) = ([2i32, 9], [address(&mut kind), address(&mut ordinal)]);
        let several = [2, address(&mut which), address(&mut outs), unknown];
        let code = gpu.call("PointerGetAttributes", &several);
        // CUDA writes four bytes of zeros to each.
        let zeroed = 7u64 << 32;
        let expected = match variant {
            Variant::CudaDriver => (0, zeroed, zeroed),
            _ => (1, untouched, untouched),
        };
        assert_eq!((code, kind, ordinal), expected);

        // What needs a current context, and what a cautious caller must expect.
        assert_eq!(gpu.get("MemGetAddressRange_v2", &[0, plain]), Err(201));
        assert_eq!(attribute(&gpu, 3, plain), Err(201));
        gpu.control.set("query_needs_context", 1);
        assert_eq!(attribute(&gpu, 2, plain), Err(201));
        gpu.bind(1);
        assert_eq!(attribute(&gpu, 2, plain), Ok(2));
        assert_eq!(gpu.get("MemGetAddressRange_v2", &[0, plain + 77]), Ok(plain));
        assert_eq!(gpu.control.count("contexts.0"), 0);
    }
}

#[test]
fn hip_tells_several_attributes_at_once() {
    for variant in [Variant::Hip5, Variant::Hip6, Variant::Hip7] {
        let gpu = Gpu::new(variant);
        let mut host = [0u8; 64];
        let managed = gpu.control.alloc(1, 4096, Memory::Managed).unwrap();
        for (addr, known) in [(managed + 9, true), (address(&mut host), false)] {
            // BUFFER_ID and RANGE_SIZE are four bytes wide here, and IS_MANAGED a flag.
            let mut which = [7i32, 9, 8, 12];
            let mut told = [u64::MAX << 32; 4];
            let mut outs = told.each_mut().map(|slot| std::ptr::from_mut(slot) as u64);
            let several = [4, address(&mut which), address(&mut outs), addr];
            assert_eq!(gpu.call("DrvPointerGetAttributes", &several), 0);
            let [id, ordinal, is_managed, size] = told.map(|slot| slot as u32);
            assert_eq!((id != 0, ordinal, is_managed), (known, known.into(), known.into()));
            assert_eq!(size, if known { 4096 } else { 0 });
            assert!(!known || told.iter().all(|slot| *slot >> 32 == u64::from(u32::MAX)));
        }
    }
}

#[test]
fn a_freed_address_comes_back_as_another_buffer() {
    let gpu = Gpu::new(Variant::CudaDriver);
    gpu.bind(0);
    let first = gpu.malloc(100_000).unwrap();
    let id = attribute(&gpu, 7, first).unwrap();
    assert_eq!(gpu.free(first), 0);
    assert_eq!((attribute(&gpu, 2, first), gpu.free(first)), (Err(1), 1));
    let second = gpu.malloc(50_000).unwrap();
    assert_eq!(second, first);
    assert_ne!(attribute(&gpu, 7, second), Ok(id));
    assert_eq!(gpu.control.count("memory_used.0"), 53_248);
}

#[test]
fn memory_ends_where_it_ends() {
    for variant in Variant::ALL {
        let gpu = Gpu::new(variant);
        gpu.bind(0);
        assert_eq!(gpu.malloc(1 << 50), Err(2), "{variant:?}");
        assert_eq!(gpu.malloc(0), Err(1));
        let (device, host) = (gpu.malloc(1000).unwrap(), gpu.pinned(2000).unwrap());
        let stream = gpu.stream();
        assert_eq!(gpu.to_host(host, device, 1001, stream), 1);
        assert_eq!(gpu.to_host(host + 1001, device, 1000, stream), 1);
        assert_eq!(gpu.to_host(host, device, 1000, stream), 0);
        assert_eq!(gpu.synchronize(stream), 0);
    }
}

#[test]
fn copies_cross_the_parts_of_mapped_memory() {
    let gpu = Gpu::new(Variant::CudaDriver);
    gpu.bind(0);
    let len = 5 << 20;
    let (mapped, device) = (
        gpu.control.alloc(0, len, Memory::Mapped).unwrap(),
        gpu.control.alloc(1, len, Memory::Device).unwrap(),
    );
    let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
    gpu.control.write(device, &bytes).unwrap();
    let stream = gpu.stream();
    assert_eq!(gpu.call("MemcpyAsync", &[mapped, device, len, stream]), 0);
    assert_eq!(gpu.synchronize(stream), 0);
    assert_eq!(gpu.peek(mapped, bytes.len()), bytes);
    assert_eq!(gpu.control.count("d2d_bytes.1"), len);
    gpu.control.free(mapped).unwrap();
    assert_eq!(attribute(&gpu, 2, mapped), Err(1));
}

#[test]
fn programs_map_their_own_memory() {
    let gpu = Gpu::new(Variant::CudaDriver);
    gpu.bind(0);
    let part = 2 << 20;
    let mut properties = [1i32, 0, 1, 1, 0, 0, 0, 0];
    let start = gpu.get("MemAddressReserve", &[4 * part, 0, 0, 0]).unwrap();
    let handle = gpu.get("MemCreate", &[part, address(&mut properties), 0]).unwrap();
    assert_eq!(gpu.call("MemMap", &[start + part, part, 0, handle, 0]), 0);
    assert_eq!(gpu.call("MemRelease", &[handle]), 0);
    assert_eq!((attribute(&gpu, 2, start), attribute(&gpu, 2, start + part)), (Err(1), Ok(2)));
    assert_eq!(attribute(&gpu, 9, start + part), Ok(1));
    assert_eq!(gpu.call("MemAddressFree", &[start, 4 * part]), 1);
    assert_eq!(gpu.call("MemUnmap", &[start + part, part]), 0);
    assert_eq!(gpu.call("MemAddressFree", &[start, 4 * part]), 0);
    assert_eq!(gpu.control.count("memory_used.1"), 0);
}

#[test]
fn host_memory_is_pinned_and_registered() {
    for variant in Variant::ALL {
        let gpu = Gpu::new(variant);
        gpu.bind(0);
        let (register, unregister, free) = match (gpu.is_driver(), gpu.is_hip()) {
            (true, _) => ("MemHostRegister_v2", "MemHostUnregister", "MemFreeHost"),
            (_, true) => ("HostRegister", "HostUnregister", "HostFree"),
            _ => ("HostRegister", "HostUnregister", "FreeHost"),
        };
        let pinned = gpu.pinned(10_000).unwrap();
        let mut own = vec![0u8; 10_000];
        let own = address(&mut own[0]);
        assert_eq!(gpu.call(register, &[own, 10_000, 1]), 0);
        assert_eq!(gpu.call(register, &[own + 5000, 10, 1]), 712);
        assert_eq!(gpu.control.count("registered_bytes"), 10_000);
        assert_eq!(gpu.control.count("pinned_bytes"), 10_000);
        assert_eq!(gpu.call(unregister, &[own]), 0);
        assert_eq!(gpu.call(unregister, &[own]), 713);
        assert_eq!((gpu.call(free, &[pinned]), gpu.call(free, &[pinned])), (0, 1));
        gpu.control.reset();
        assert_eq!(gpu.control.count("pinned_bytes") + gpu.control.count("pinned_live"), 0);
        assert_eq!(gpu.control.count("pinned_allocations"), 0);
    }
}
