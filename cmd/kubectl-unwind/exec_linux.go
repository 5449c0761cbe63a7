package main

import (
	"runtime"
	"syscall"
)

func init() {
	runtime.LockOSThread() // the signal comes at the end of the thread that started the proxy
	endsWithUs = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
