package main

import (
	"runtime"
	"syscall"
)

func init() {
	runtime.LockOSThread() // the kernel sends Pdeathsig when the thread that started the proxy exits
	endsWithUs = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
