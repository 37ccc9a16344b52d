"""The tier below the device: KV and recurrent states in host memory. Imported only by engines that have one."""
